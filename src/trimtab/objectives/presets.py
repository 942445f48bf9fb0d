"""The named objectives, each with the defaults of its paper.

`lookup.objective` changes them by keywords. Sources and choices: docs/methods.md; which to use: docs/choosing.md.
"""

from __future__ import annotations

import math

from trimtab.corrections.masks import OPSM, Band, Divergence, PrefixBudget
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import ratio_bounds
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.keywords import Preset
from trimtab.objectives.objective import Objective
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Unclipped

SAMPLER = Ratio("token", "behavior")
BY_SEQUENCE = Aggregation("seq-mean-token-mean")
FIXED_LENGTH = Aggregation("constant", length_max=1024)
NEAR_ONE = (Band("geometric", 0.99, 1.01),)
PERTURBED = (
    "π has noise, μ none: layer l reads h_l + σ_l·ε_l, ε_l ~ N(0, I), drawn anew for every token of every update",
    "minimized is the expectation of this loss over ε, by one draw for an update; all other forwards have no noise",
    "ln σ_l, one for each layer, is learned with it at its own rate (`[perturbation]`); at σ_l = 0 this equals bypass",
    "left out: noise of another kind than Gaussian, and one scale for each expert",
)
WITHOUT_NOISE = ("no noise: this is the loss of `token-alp`, and what it is compared with",)
SPLICED = ("the trainer lets an older policy begin each response, whose μ is on the prefix; the sampler's on the rest",)

_PRESETS = (
    # The GRPO family: one ratio, current/proximal. The mismatch proximal/behavior is ignored.
    Preset(
        Objective("grpo", Ratio(), Clipped(), aggregation=BY_SEQUENCE),
        does="PPO's clip on the token ratio; advantages are divided by the group's std.",
        when="Use it where sampler and trainer agree: it never reads what the sampler reported.",
        source="DeepSeekMath, arXiv 2402.03300.",
    ),
    Preset(
        Objective("dapo", Ratio(), Clipped(0.2, 0.28)),
        does="GRPO with a higher upper clip bound and a mean over all tokens of the update.",
        when="Use it as `grpo`, to let improbable tokens become more probable.",
        source="DAPO, arXiv 2503.14476; dynamic sampling and the overlong reward are options of trainer and reward.",
    ),
    Preset(
        Objective("dr-grpo", Ratio(), Clipped(), aggregation=FIXED_LENGTH, advantage="dr-grpo"),
        does="GRPO without division by the group's std, with a constant denominator.",
        when="Use it as `grpo`, where neither length nor difficulty may change the weight of a token.",
        source="Dr. GRPO, arXiv 2503.20783.",
    ),
    Preset(
        Objective("gspo", Ratio("geometric"), Clipped(3e-4, 4e-4), aggregation=BY_SEQUENCE),
        does="Clips the geometric ratio of the whole response (GSPO-token).",
        when="Use it where token ratios are noisy, as with MoE models; it ignores the mismatch like `grpo`.",
        source="GSPO, arXiv 2507.18071.",
    ),
    Preset(
        Objective("cispo", Ratio(), Reinforce(5.0)),
        does="REINFORCE times the token ratio, capped at `ceiling` and without gradient.",
        when="Use it where no token may lose its gradient to clipping; it ignores the mismatch like `grpo`.",
        source="MiniMax-M1, arXiv 2506.13585, with the absolute ceiling of ScaleRL, arXiv 2510.13786.",
    ),
    Preset(
        Objective("reinforce", Ratio(), LogProb()),
        does="The policy gradient, without a ratio and without clipping.",
        when="Use it on-policy, or as the baseline without any correction.",
        source="Williams 1992.",
    ),
    # Bypass: the ratio current/behavior, without a proximal policy.
    Preset(
        Objective("token-bypass", SAMPLER, Clipped()),
        does="PPO whose token ratio is to the sampler: the clip bounds the mismatch too.",
        when="Use it to save the forward of the proximal policy while ratios per token stay close to 1.",
        source="Bypass mode of verl and Miles; baseline of arXiv 2603.19470.",
    ),
    Preset(
        Objective("seq-bypass", Ratio("sequence", "behavior"), Clipped(0.5, 3.0, 10.0)),
        does="PPO whose ratio is to the sampler, a product over the response.",
        when="Use it for stale rollouts as long as the clip range still holds most responses.",
        source="Baseline of arXiv 2603.19470; bypass mode of verl and Miles.",
    ),
    Preset(
        Objective("token-alp-bypass", SAMPLER, Clipped(0.2, 0.28, 10.0), notes=WITHOUT_NOISE),
        does="`token-bypass` with the clip bounds of `token-alp`: the same loss without noise.",
        when="Use it as the baseline of `token-alp`, which differs from it by its perturbation only.",
        source="Baseline of arXiv 2603.19470.",
    ),
    # Decoupled: the ratio current/proximal is clipped, the mismatch proximal/behavior corrected by a weight or a mask.
    Preset(
        Objective("token-tis", Ratio(), Clipped(), Weight("token", "truncate", max=2.0)),
        does="PPO times a weight per token: the ratio to the sampler, at most `weight_max`.",
        when="Use it first for a small mismatch, without tokens that differ by a large factor.",
        source="Truncated importance sampling: Yao et al. 2025; verl, Miles.",
    ),
    Preset(
        Objective("seq-tis", Ratio(), Clipped(), Weight("sequence", "truncate", max=2.0)),
        does="PPO times a truncated weight per response.",
        when="Use it on short responses, where the bias of token weights matters and the product stays bounded.",
        source="Truncated importance sampling: Yao et al. 2025; verl, Miles.",
    ),
    Preset(
        Objective("turn-tis", Ratio(), Clipped(), Weight("turn", "truncate", max=2.0)),
        does="PPO times a truncated weight per model turn.",
        when="Use it on multi-turn responses, where the product over the whole response is far from 1.",
        source="`seq-tis` with one weight for each turn; the product over long episodes vanishes (NeMo-RL issue 2269).",
    ),
    Preset(
        Objective("seq-mis", Ratio(), Clipped(), Weight("sequence", "mask", 0.0, 2.0)),
        does="PPO times a weight per response, which is 0 outside a band.",
        when="Use it to drop whole responses whose weight is too large.",
        source="Liu, Li et al. 2025; TRL's `sequence_mask`; ALP's Token-MIS (arXiv 2603.19470, Table 1).",
    ),
    Preset(
        Objective("seq-mis-seq-ratio", Ratio("sequence"), Clipped(0.5, 3.0), Weight("sequence", "mask", 0.0, 2.0)),
        does="`seq-mis` whose clipped ratio is that of the response, too.",
        when="Use it as `seq-mis`, where clipping too should decide about whole responses.",
        source="Seq-MIS of ALP (arXiv 2603.19470, Table 1).",
    ),
    Preset(
        Objective("icepop", Ratio(), Clipped(), Weight("token", "mask", 0.5, 5.0), aggregation=BY_SEQUENCE),
        does="PPO times a weight per token, which is 0 outside a band.",
        when="Use it for MoE models and quantized samplers: it rejects the same share of tokens at any length.",
        source="IcePop: Ring-1T, arXiv 2510.18855.",
    ),
    Preset(
        Objective("geo-mask", Ratio(), Clipped(), masks=NEAR_ONE),
        does="PPO without the responses whose geometric mean ratio is outside a band.",
        when="Use it to reject responses that drifted as a whole; fit the band to the length of yours.",
        source="Miles' mismatch report, with [0.99, 1.001]; the band is that of SkyRL's examples.",
    ),
    Preset(
        Objective("geo-mask-token-tis", Ratio(), Clipped(), Weight("token", "clip", 0.5, 2.0), NEAR_ONE),
        does="`geo-mask` times a clipped weight per token.",
        when="Use it for a large mismatch, such as that of MoE routing; there with `weight_max=1.5`.",
        source="Miles' masked importance sampling (its mismatch helper); the band is that of SkyRL's examples.",
    ),
    Preset(
        Objective("k3-mask", Ratio(), Clipped(), masks=(Divergence("k3", "mean", 0.01),)),
        does="PPO without the responses whose mean k3 exceeds a bound.",
        when="Use it where drift in both directions must count: k3 never cancels over a response.",
        source="Trust-region masking, arXiv 2512.23075; verl's `seq_mean_k3`.",
    ),
    Preset(
        Objective("opsm", Ratio(), Clipped(), masks=(OPSM(0.05),), aggregation=BY_SEQUENCE),
        does="GRPO without negative responses that drifted from the sampler.",
        when="Use it for stale rollouts and many updates per batch; drift and mismatch both count.",
        source="DeepSeek-V3.2, arXiv 2512.02556.",
    ),
    # Additional data or models.
    Preset(
        Objective("token-alp", SAMPLER, Clipped(0.2, 0.28, 10.0), notes=PERTURBED),
        does="`token-bypass` with the perturbed policy in the numerator.",
        when="Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.",
        source="Adaptive layerwise perturbation, arXiv 2603.19470 eq. 2.",
    ),
    Preset(
        Objective("seq-alp", Ratio("sequence", "behavior"), Clipped(0.5, 3.0, 10.0), notes=PERTURBED),
        does="`seq-bypass` with the perturbed policy in the numerator.",
        when="Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.",
        source="Adaptive layerwise perturbation, arXiv 2603.19470 eq. 3.",
    ),
    Preset(
        Objective("soup", SAMPLER, Clipped(0.2, 0.28), notes=SPLICED),
        does="PPO to the sampler, where an older policy begins each response.",
        when="Use it with `[prefix]`: an older policy begins a response and the current one completes it.",
        source="Single-sample mix-policy (SOUP), arXiv 2601.21476.",
    ),
    Preset(
        Objective(
            "oapl",
            Ratio("sequence", "behavior"),
            Regression(1e-3),
            aggregation=Aggregation("trained-mean-token-sum"),
            advantage="optimal",
        ),
        excluded=("aggregation", "length_max"),
        does="Regresses beta times the log-ratio of the whole response on its advantage.",
        when="Use it for a sampler that lags, with `beta` set for the length of responses, each from one policy.",
        source="OAPL, arXiv 2602.19362 eq. 3.",
    ),
    Preset(
        Objective("m2po", SAMPLER, ratio_bounds.SecondMoment(0.04, "cap")),
        does="Bounds the second moment of the log-ratio to the sampler.",
        when="Use it for very stale rollouts, where the product over a response has drifted too far.",
        source='M2PO, arXiv 2510.01161: form="cap" is its official code, form="mask" the rule of the paper.',
    ),
    Preset(
        Objective("luffy", Ratio(), Shaped(0.1), aggregation=FIXED_LENGTH, advantage="dr-grpo"),
        does="r A on sampled tokens, unclipped, and pi / (pi + gamma) A on tokens of external traces.",
        when="Use it with `[demonstrations]`, which adds demonstrations to the groups.",
        source="LUFFY, arXiv 2504.14945.",
    ),
    # Trust regions: tokens or responses far from the sampler are rejected, without a proximal policy.
    Preset(
        Objective(
            "dppo",
            SAMPLER,
            Reinforce(20.0),
            masks=(Divergence("binary_tv", "token", 0.15, "current", outward=True),),
        ),
        does="Drops tokens that move away from the sampler, beyond a bound on |pi - mu|.",
        when="Use it in place of a ratio clip, which stops rare tokens too early and frequent ones too late.",
        source="Divergence PPO, arXiv 2602.04879; verl's `dppo_tv`, with the cap of its code (configuration: 3).",
    ),
    Preset(
        Objective(
            "dppo-kl",
            SAMPLER,
            Reinforce(20.0),
            masks=(Divergence("binary_kl", "token", 0.05, "current", outward=True),),
        ),
        does="`dppo` with the KL divergence of {sampled token, rest}.",
        when="Use it as `dppo`, where frequent tokens need a tighter bound than rare ones.",
        source="Divergence PPO, binary KL, arXiv 2602.04879; verl's `dppo_kl`.",
    ),
    Preset(
        Objective("ipo", SAMPLER, Unclipped(), masks=(Divergence("binary_tv", "token", 0.3, "current"),)),
        does="Drops tokens beyond a bound on |pi - mu|, in either direction; no clip.",
        when="Use it as `dppo`, where tokens far from the sampler should not be trained at all.",
        source="The loss type `ipo` of prime-rl (not its default), without its squared log-ratio.",
    ),
    Preset(
        Objective(
            "flash-reinforce",
            SAMPLER,
            Reinforce(math.inf),
            masks=(Divergence("binary_kl", "mean", 3e-3, "current"),),
            aggregation=BY_SEQUENCE,
            advantage="batch-mean",
        ),
        excluded=("ceiling",),
        does="REINFORCE with token weights, without responses whose mean binary KL is large.",
        when="Use it with one response for each prompt: the advantage is relative to the whole batch.",
        source="FlashREINFORCE (NVIDIA); OpenRLHF 0.11.2, slime, Miles.",
    ),
    Preset(
        Objective(
            "trm",
            SAMPLER,
            Unclipped(),
            masks=(Divergence("k2", "max", 0.05, "current"), Divergence("k3", "mean", 1e-3, "current")),
            aggregation=BY_SEQUENCE,
        ),
        does="Drops responses whose largest k2 or mean k3 to the sampler is large; no clip.",
        when="Use it where a bound on the change of the whole policy matters more than the number of responses used.",
        source="Trust-region masking, arXiv 2512.23075; `k3-mask` is verl's form on proximal/behavior.",
    ),
    Preset(
        Objective("cppo", SAMPLER, Unclipped(), masks=(PrefixBudget(0.15, 0.02, 0.9, 0.8),)),
        does="`dppo` with a budget for each response, which early tokens spend for later ones.",
        when="Use it for long responses, where an early change decides about everything that follows.",
        source="Cumulative prefix divergence, arXiv 2606.10968.",
    ),
    # Other shapes: prefix levels, bounds by age, smooth weights, centered scores.
    Preset(
        Objective("ctpo", Ratio("prefix"), ratio_bounds.GrowingClip(0.025, 0.05, 0.05, 0.5), aggregation=BY_SEQUENCE),
        does="Clips the product of ratios up to each token, with bounds that grow with its position.",
        when="Use it for many updates a batch on long responses: later tokens add no variance to earlier ones.",
        source="Causal trajectory policy optimization, arXiv 2605.07331; bounds are on log r, times n^power.",
    ),
    Preset(
        Objective("pnpo", Ratio("prefix_geometric"), ratio_bounds.Banded(), aggregation=BY_SEQUENCE),
        does="Weighs each token by the geometric mean of ratios up to it; 0 outside a band.",
        when="Use it as `gspo`, where a token must not be judged by those after it.",
        source="Prefix normalization, arXiv 2608.01418; the paper's bounds are not known, these are GRPO's.",
    ),
    Preset(
        Objective("a3po", SAMPLER, ratio_bounds.AgedClip()),
        does="Clips the ratio to the sampler, with bounds that widen with the age of each token.",
        when="Use it for asynchronous rollouts instead of a decoupled loss: it needs no proximal forward.",
        source="A-3PO, arXiv 2512.06547; AReaL's `loglinear`. At age 8 the bounds are 0.17 and 4.3.",
    ),
    Preset(
        Objective("sapo", Ratio(), ratio_bounds.SoftGate(1.0, 1.05), aggregation=BY_SEQUENCE),
        does="Damps the token ratio by a sigmoid instead of clipping it.",
        when="Use it where clipping wastes tokens, as with MoE models; it ignores the mismatch like `grpo`.",
        source="Soft adaptive policy optimization, arXiv 2511.20347; TRL, verl.",
    ),
    Preset(
        Objective("vespo", Ratio("sequence", "behavior"), ratio_bounds.GammaWeight(2.0, 3.0, 3.0, 2.0)),
        does="Weighs each response by a smooth function of its product ratio, which vanishes far from 1.",
        when="Use it for very stale rollouts of short or moderate length: the product is not normalized by length.",
        source="Variational sequence-level soft policy optimization, arXiv 2602.10693; TRL.",
    ),
    Preset(
        Objective("gmpo", Ratio(), ratio_bounds.GeometricClip(0.4, 0.4), aggregation=BY_SEQUENCE),
        does="The geometric mean of the token ratios, each clipped in log space first.",
        when="Use it where single outliers dominate the arithmetic mean; it ignores the mismatch like `grpo`.",
        source="Geometric-mean policy optimization, arXiv 2507.20673; verl's `geo_mean`. The bounds are on log r.",
    ),
    Preset(
        Objective("drpo", SAMPLER, ratio_bounds.QuadraticPenalty(0.15)),
        does="A quadratic penalty in place of a mask: the gradient turns where |pi - mu| passes epsilon.",
        when="Use it as `dppo`, where a hard mask makes training unsteady.",
        source="Divergence-regularized policy optimization, arXiv 2606.09821; epsilon on DPPO's scale.",
    ),
    Preset(
        Objective("score-centering", SAMPLER, Reinforce(2.0), centering=True, advantage="dr-grpo"),
        does="Token weights up to `ceiling`, minus the expected score under the sampler.",
        when="Use it with quantized samplers that return their most probable ids (`[sampling] top_logprobs`).",
        source="Score centering, arXiv 2609.20807.",
    ),
)

PRESETS: dict[str, Preset] = {preset.objective.name: preset for preset in _PRESETS}

COMPOSED = Preset(Objective("composed", Ratio(), Unclipped()))
"""The base of objectives that are built from given parts alone; a surrogate must be among these."""


def get_preset(name: str) -> Preset:
    """Returns the preset of this name, or `composed`. Raises `TrimtabError` for an unknown name."""
    known = {**PRESETS, COMPOSED.objective.name: COMPOSED}
    if name not in known:
        listing = "`trimtab explain` lists them, `trimtab.objectives()` in Python"
        raise TrimtabError(f"unknown objective {name!r}{did_you_mean(name, known, listing)}")
    return known[name]


def is_custom(name: str) -> bool:
    """Whether a name refers to a custom function. Building such an objective runs that function."""
    return ":" in name
