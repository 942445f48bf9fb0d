"""The named objectives, each with the defaults of its paper.

`lookup.objective` changes them by keywords. Sources and choices: docs/methods.md; which to use: docs/choosing.md.
"""

from __future__ import annotations

import math

from trimtab.corrections.masks import OPSM, Band, Divergence, PrefixBudget
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.keywords import Preset
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip, SecondMoment
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Unclipped

SAMPLER = Ratio("token", "behavior")
BY_SEQUENCE = Aggregation("seq-mean-token-mean")
FIXED_LENGTH = Aggregation("constant", length_max=1024)
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
        does="Clips the token ratio current/proximal; advantages are centered and divided by the group's std.",
        when="Use it where sampler and trainer agree: it never reads what the sampler reported.",
        source="DeepSeekMath, arXiv 2402.03300.",
    ),
    Preset(
        Objective("dapo", Ratio(), Clipped(0.2, 0.28)),
        does="GRPO with a higher upper clip bound and a mean over all tokens of the update.",
        when="Use it as `grpo`, where the upper clip bound keeps improbable tokens from becoming more probable.",
        source="DAPO, arXiv 2503.14476; its dynamic sampling is a trainer option, its overlong reward a reward option.",
    ),
    Preset(
        Objective("dr-grpo", Ratio(), Clipped(), aggregation=FIXED_LENGTH, advantage="dr-grpo"),
        does="GRPO without division by the group's std and with the constant denominator N * length_max.",
        when="Use it as `grpo`, where neither length nor difficulty may change the weight of a token.",
        source="Dr. GRPO, arXiv 2503.20783.",
    ),
    Preset(
        Objective("gspo", Ratio("geometric"), Clipped(3e-4, 4e-4), aggregation=BY_SEQUENCE),
        does="Clips the geometric ratio of the whole response; each token keeps its own gradient (GSPO-token).",
        when="Use it where token ratios are noisy, as with MoE models; it ignores the mismatch like `grpo`.",
        source="GSPO, arXiv 2507.18071.",
    ),
    Preset(
        Objective("cispo", Ratio(), Reinforce(5.0)),
        does="REINFORCE with the detached token ratio, capped at `ceiling`, as weight.",
        when="Use it where no token may lose its gradient to clipping; it ignores the mismatch like `grpo`.",
        source="MiniMax-M1, arXiv 2506.13585, with the absolute ceiling of ScaleRL, arXiv 2510.13786.",
    ),
    Preset(
        Objective("reinforce", Ratio(), LogProb()),
        does="The policy gradient A log pi, without a ratio and without clipping.",
        when="Use it on-policy, or as the baseline that ignores that a batch was sampled by another policy.",
        source="Williams 1992.",
    ),
    # Bypass: the ratio current/behavior, without a proximal policy.
    Preset(
        Objective("token-bypass", SAMPLER, Clipped()),
        does="PPO with the token ratio current/behavior; the first update already clips the mismatch.",
        when="Use it to save the forward of the proximal policy while ratios per token stay close to 1.",
        source="Bypass mode of verl and Miles; baseline of arXiv 2603.19470.",
    ),
    Preset(
        Objective("seq-bypass", Ratio("sequence", "behavior"), Clipped(0.5, 3.0, 10.0)),
        does="PPO with the product ratio current/behavior of the response, clipped to [0.5, 4].",
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
        does="PPO on current/proximal, times the token weight min(proximal/behavior, weight_max).",
        when="Use it first for a small mismatch without a heavy tail.",
        source="Truncated importance sampling: Yao et al. 2025; verl, Miles.",
    ),
    Preset(
        Objective("seq-tis", Ratio(), Clipped(), Weight("sequence", "truncate", max=2.0)),
        does="PPO on current/proximal, times the truncated product of proximal/behavior over the response.",
        when="Use it on short responses, where the bias of token weights matters and the product stays bounded.",
        source="Truncated importance sampling: Yao et al. 2025; verl, Miles.",
    ),
    Preset(
        Objective("turn-tis", Ratio(), Clipped(), Weight("turn", "truncate", max=2.0)),
        does="PPO on current/proximal, times the truncated product of proximal/behavior over each model turn.",
        when="Use it on multi-turn responses, where the product over the whole response is far from 1.",
        source="`seq-tis` with one weight for each turn; the product over long episodes vanishes (NeMo-RL issue 2269).",
    ),
    Preset(
        Objective("seq-mis", Ratio(), Clipped(), Weight("sequence", "mask", 0.0, 2.0)),
        does="PPO on current/proximal, times the product of proximal/behavior over the response, 0 outside a band.",
        when="Use it to drop whole responses whose weight is too large, instead of truncating it.",
        source='Sequence MIS: Liu, Li et al. 2025, "When Speed Kills Stability"; TRL\'s `sequence_mask`. ALP (arXiv '
        "2603.19470, Table 1) calls it Token-MIS, after its clipped ratio; elsewhere that is `icepop`, whose weight "
        "is that of a token.",
    ),
    Preset(
        Objective("seq-mis-seq-ratio", Ratio("sequence"), Clipped(0.5, 3.0), Weight("sequence", "mask", 0.0, 2.0)),
        does="PPO on the product of current/proximal, times that of proximal/behavior over the response, 0 outside a "
        "band.",
        when="Use it as `seq-mis`, where clipping too should decide about whole responses.",
        source="Seq-MIS of ALP (arXiv 2603.19470, Table 1): ratio and weight are both of the response.",
    ),
    Preset(
        Objective("icepop", Ratio(), Clipped(), Weight("token", "mask", 0.5, 5.0), aggregation=BY_SEQUENCE),
        does="PPO on current/proximal, times the token weight, zeroed outside [weight_min, weight_max].",
        when="Use it for MoE models and quantized samplers: it rejects the same share of tokens at any length.",
        source="IcePop: Ring-1T, arXiv 2510.18855.",
    ),
    Preset(
        Objective("geo-mask", Ratio(), Clipped(), masks=(Band("geometric", 0.99, 1.01),)),
        mask_keywords={"keep_min": "masks.0.min", "keep_max": "masks.0.max"},
        does="PPO on current/proximal; drops responses whose geometric mean ratio is outside the band.",
        when="Use it to reject mismatched responses of any length: the mean has no length bias, the product has.",
        source="Miles' mismatch report; SkyRL.",
    ),
    Preset(
        Objective(
            "geo-mask-token-tis",
            Ratio(),
            Clipped(),
            Weight("token", "clip", 0.5, 2.0),
            masks=(Band("geometric", 0.99, 1.01),),
        ),
        mask_keywords={"keep_min": "masks.0.min", "keep_max": "masks.0.max"},
        does="`geo-mask` with a token weight clipped to [weight_min, weight_max].",
        when="Use it for a large mismatch, such as that of MoE routing; there with `weight_max=1.5`: Miles' run with 2 "
        "collapsed.",
        source="Miles' masked importance sampling (its mismatch helper).",
    ),
    Preset(
        Objective("k3-mask", Ratio(), Clipped(), masks=(Divergence("k3", "mean", 0.01),)),
        mask_keywords={"divergence_max": "masks.0.max"},
        does="PPO on current/proximal; drops responses whose mean k3 of proximal/behavior exceeds the bound.",
        when="Use it where drift in both directions must count: k3 never cancels over a response.",
        source="Trust-region masking, arXiv 2512.23075; verl's `seq_mean_k3`.",
    ),
    Preset(
        Objective("opsm", Ratio(), Clipped(), masks=(OPSM(0.05),), aggregation=BY_SEQUENCE),
        mask_keywords={"delta": "masks.0.delta"},
        does="GRPO that drops responses with A < 0 and mean(log mu - log pi) above `delta`.",
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
        does="PPO on current/behavior, where `behavior` is spliced per token from two policies.",
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
        does="Regresses beta times the log-ratio of the whole response to mu on r - V.",
        when="Use it for a sampler that lags, with `beta` set for the length of the responses; one policy must have "
        "sampled each of them.",
        source="OAPL, arXiv 2602.19362 eq. 3.",
    ),
    Preset(
        Objective("m2po", SAMPLER, SecondMoment(0.04, "cap")),
        does="Bounds the second moment of log current/behavior over the update by `tau`.",
        when="Use it for very stale rollouts, where the product over a response has drifted too far.",
        source='M2PO, arXiv 2510.01161: form="cap" is its official code, form="mask" the rule of the paper.',
    ),
    Preset(
        Objective("luffy", Ratio(), Shaped(0.1), aggregation=FIXED_LENGTH, advantage="dr-grpo"),
        does="r A on sampled tokens, unclipped, and pi / (pi + gamma) A on tokens of external traces.",
        when="Use it with `[demonstrations]`, which adds demonstrations to the groups.",
        source="LUFFY, arXiv 2504.14945.",
    ),
    # Trust regions: what is far from the sampler is rejected, without a proximal policy.
    Preset(
        Objective(
            "dppo",
            SAMPLER,
            Reinforce(20.0),
            masks=(Divergence("binary_tv", "token", 0.15, "current", outward=True),),
        ),
        mask_keywords={"divergence_max": "masks.0.max"},
        does="Drops tokens that move away from the sampler where |pi - mu| exceeds the bound.",
        when="Use it in place of a ratio clip, which stops rare tokens too early and frequent ones too late.",
        source="Divergence PPO, binary total variation, arXiv 2602.04879; verl's `dppo_tv`, with the cap on the weight "
        "of its code, 20 (its configuration has 3).",
    ),
    Preset(
        Objective(
            "dppo-kl",
            SAMPLER,
            Reinforce(20.0),
            masks=(Divergence("binary_kl", "token", 0.05, "current", outward=True),),
        ),
        mask_keywords={"divergence_max": "masks.0.max"},
        does="`dppo` with the KL divergence of the two-point distributions {sampled token, rest}.",
        when="Use it as `dppo`, where frequent tokens need a tighter bound than rare ones.",
        source="Divergence PPO, binary KL, arXiv 2602.04879; verl's `dppo_kl`.",
    ),
    Preset(
        Objective("ipo", SAMPLER, Unclipped(), masks=(Divergence("binary_tv", "token", 0.3, "current"),)),
        mask_keywords={"divergence_max": "masks.0.max"},
        does="Drops tokens where |pi - mu| exceeds the bound, in either direction; no clip.",
        when="Use it as `dppo`, where tokens far from the sampler should not be trained at all.",
        source="The loss type `ipo` of prime-rl (not its default, which is nearer to `dppo`), without its squared "
        "log-ratio.",
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
        mask_keywords={"divergence_max": "masks.0.max"},
        excluded=("ceiling",),
        does="REINFORCE with exact token weights; drops responses whose mean binary KL from the sampler exceeds the "
        "bound.",
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
        mask_keywords={"k2_max": "masks.0.max", "k3_max": "masks.1.max"},
        does="Drops responses whose largest k2 or mean k3 of current/behavior exceeds its bound; no clip.",
        when="Use it where a bound on the change of the whole policy matters more than the number of responses used.",
        source="Trust-region masking, arXiv 2512.23075, on the ratio of the paper; `k3-mask` is verl's form on "
        "proximal/behavior.",
    ),
    Preset(
        Objective("cppo", SAMPLER, Unclipped(), masks=(PrefixBudget(0.15, 0.02, 0.9, 0.8),)),
        mask_keywords={
            "divergence_max": "masks.0.max",
            "budget": "masks.0.budget",
            "quantile": "masks.0.quantile",
            "weight_min": "masks.0.weight_min",
        },
        does="`dppo` with a budget of divergence for each response, which early tokens spend for later ones.",
        when="Use it for long responses, where an early change decides about everything that follows.",
        source="Cumulative prefix divergence, arXiv 2606.10968.",
    ),
    # Other shapes: prefix levels, bounds by age, smooth weights, centered scores.
    Preset(
        Objective("ctpo", Ratio("prefix"), GrowingClip(0.025, 0.05, 0.05, 0.5), aggregation=BY_SEQUENCE),
        does="Clips the product of current/proximal over the tokens up to each token, with bounds that grow with its "
        "position.",
        when="Use it for many updates a batch on long responses: later tokens add no variance to the weight of earlier "
        "ones.",
        source="Causal trajectory policy optimization, arXiv 2605.07331; bounds and dual clip are on log r and times "
        "n^power.",
    ),
    Preset(
        Objective("pnpo", Ratio("prefix_geometric"), Banded(), aggregation=BY_SEQUENCE),
        does="Weighs each token by the geometric mean of current/proximal up to it, and drops it outside the band.",
        when="Use it as `gspo`, where a token must not be judged by those after it.",
        source="Prefix normalization, arXiv 2608.01418; the paper's bounds are not known, these are GRPO's.",
    ),
    Preset(
        Objective("a3po", SAMPLER, AgedClip()),
        does="Clips current/behavior with bounds that widen with the age of each token.",
        when="Use it for asynchronous rollouts instead of a decoupled loss: it needs no proximal forward.",
        source="A-3PO, arXiv 2512.06547; AReaL's `loglinear`. At age 8 the bounds are 0.17 and 4.3.",
    ),
    Preset(
        Objective("sapo", Ratio(), SoftGate(1.0, 1.05), aggregation=BY_SEQUENCE),
        does="Damps the token ratio by a sigmoid instead of clipping it.",
        when="Use it where clipping wastes tokens, as with MoE models; it ignores the mismatch like `grpo`.",
        source="Soft adaptive policy optimization, arXiv 2511.20347; TRL, verl.",
    ),
    Preset(
        Objective("vespo", Ratio("sequence", "behavior"), GammaWeight(2.0, 3.0, 3.0, 2.0)),
        does="Weighs each response by a smooth function of its product ratio current/behavior that vanishes far from "
        "1.",
        when="Use it for very stale rollouts of short or moderate length: the product is not normalized by length.",
        source="Variational sequence-level soft policy optimization, arXiv 2602.10693; TRL.",
    ),
    Preset(
        Objective("gmpo", Ratio(), GeometricClip(0.4, 0.4), aggregation=BY_SEQUENCE),
        does="The geometric mean of the token ratios, each clipped in log space first.",
        when="Use it where single outliers dominate the arithmetic mean; it ignores the mismatch like `grpo`.",
        source="Geometric-mean policy optimization, arXiv 2507.20673; verl's `geo_mean`. The bounds are on log r.",
    ),
    Preset(
        Objective("drpo", SAMPLER, QuadraticPenalty(0.15)),
        does="A quadratic penalty on current/behavior in place of a mask: the gradient turns where |pi - mu| passes "
        "epsilon.",
        when="Use it as `dppo`, where a hard mask makes training unsteady.",
        source="Divergence-regularized policy optimization, arXiv 2606.09821; epsilon on DPPO's scale "
        "(docs/methods.md).",
    ),
    Preset(
        Objective("score-centering", SAMPLER, Reinforce(2.0), centering=True, advantage="dr-grpo"),
        does="Token weights current/behavior up to `ceiling`, minus the expected score under the sampler.",
        when="Use it with samplers that return their most probable ids (`[sampling] top_logprobs`), quantized ones "
        "first.",
        source="Score centering, arXiv 2609.20807; advantages are centered and not divided by the group's std.",
    ),
)

PRESETS: dict[str, Preset] = {preset.objective.name: preset for preset in _PRESETS}

COMPOSED = Preset(Objective("composed", Ratio(), Unclipped()))
"""An objective of given parts alone, one of which is a surrogate."""


def get_preset(name: str) -> Preset:
    """Returns the preset of a name, `composed` included. Raises `TrimtabError` for an unknown one."""
    known = {**PRESETS, COMPOSED.objective.name: COMPOSED}
    if name not in known:
        listing = "`trimtab explain` lists them, `trimtab.objectives()` in Python"
        raise TrimtabError(f"unknown objective {name!r}{did_you_mean(name, known, listing)}")
    return known[name]


def is_custom(name: str) -> bool:
    """Whether a name refers to a custom function. Building it runs that code."""
    return ":" in name
