"""The charts of a report, by section and in order; descriptions come from the metric catalog."""

from __future__ import annotations

from trimtab.report.chart_specs import QUANTILES, Chart


def _quantiles(title: str, prefix: str, about: str) -> Chart:
    return Chart(title, about, {q: f"{prefix}{q}" for q in QUANTILES}, kind="quantiles")


RUN_CHARTS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            Chart("Reward", "reward/mean", {"mean": "reward/mean", "": "reward/<name>"}),
            Chart("Reward by task", "mixture/<task>/reward"),
            Chart("Held-out accuracy", "eval/<task>/greedy", kind="accuracy"),
            Chart("Response length", "length/mean", {"mean": "length/mean", "longest": "length/max"}),
            Chart(
                "Entropy",
                "entropy/mean",
                {"trainer": "entropy/mean", "sampler": "entropy/rollout"},
                what="Mean entropy of the policy per token, as trainer and sampler see it.",
            ),
            Chart(
                "Gradient norm",
                "optim/grad_norm",
                {"before clipping": "optim/grad_norm"},
                log=True,
                bound="optim.grad_clip",
                what="Norm before clipping, mean over the step's updates; what is above the bound is scaled down.",
            ),
            Chart(
                "Groups without signal",
                "groups/no_signal",
                {"no signal": "groups/no_signal", "sampled": "groups/sampled"},
                shade=False,
                what="Groups whose rewards are all equal give no gradient; beside them all groups that were sampled.",
            ),
            Chart(
                "Dropped responses and skipped updates",
                "trajectories/dropped",
                {"dropped": "trajectories/dropped", "skipped": "optim/skipped"},
                each=True,
                what="Responses left out (a failed reward, a log-prob that is not finite) and updates skipped.",
            ),
        ),
    ),
    (
        "Trainer against sampler",
        (
            Chart(
                "KL estimates",
                "mismatch/k3",
                {"k2": "mismatch/k2", "k3": "mismatch/k3"},
                log=True,
                what="Distance of trainer and sampler from their log-probs of the same tokens; look at k3 first.",
            ),
            Chart("Signed KL estimate", "mismatch/k1", log=True),
            Chart(
                "χ² divergence",
                "mismatch/chi2_token",
                {"per token": "mismatch/chi2_token", "per sequence": "mismatch/chi2_seq"},
                log=True,
                each=True,
                what="What importance weights cost in variance; per sequence it grows exponentially with length. "
                "Below 0: an estimate from few tokens, whose mean ratio is below 1.",
            ),
            Chart(
                "Effective sample size",
                "mismatch/ess_token",
                {"token weights": "mismatch/ess_token", "sequence weights": "mismatch/ess_seq"},
                each=True,
                what="The share of the data that counts under importance weights, before any bound.",
            ),
            _quantiles("Raw ratio trainer / sampler", "mismatch/ratio_", "mismatch/ratio_q99"),
            Chart(
                "Geometric drift of a response",
                "drift/mismatch_q05",
                {f"{part} {q}": f"drift/{part}_{q}" for part in ("mismatch", "staleness") for q in ("q05", "q50")},
                what="Mean log-ratio of a response, as trainer over sampler and as current over proximal policy; OPSM "
                "drops what falls below minus its delta in the sum.",
            ),
            Chart("Perplexity ratio", "mismatch/ppl_ratio"),
            Chart("Training perplexity", "mismatch/ppl_train"),
            Chart("Pearson correlation", "mismatch/pearson"),
        ),
    ),
    (
        "The correction at work",
        (
            _quantiles("Weight before its bound", "weight_raw/", "weight_raw/q99"),
            _quantiles("Weight after its bound", "weight/", "weight/q99"),
            Chart("Weights changed by the bound", "weight/changed"),
            _quantiles("Ratio in the loss, before clipping", "ratio/", "ratio/q99"),
            Chart(
                "Clipped tokens",
                "clip/high",
                {"low": "clip/low", "high": "clip/high", "dual": "clip/dual", "mask": "clip/second_moment"},
                what="Share of tokens without gradient because their ratio is beyond a clip bound.",
            ),
            Chart(
                "Rejected tokens",
                "reject/tokens",
                {"": "reject/<rule>", "any rule": "reject/tokens"},
                what="Share of tokens each rule rejected; they keep their place in the denominator.",
            ),
        ),
    ),
    (
        "Age and speed",
        (
            Chart(
                "Age of the tokens",
                "lag/mean",
                {"mean": "lag/mean", "oldest": "lag/max"},
                what="Optimizer updates between sampling a token and training on it.",
            ),
            Chart(
                "Speed",
                "tokens_per_second/rollout",
                {"sampling": "tokens_per_second/rollout", "training": "tokens_per_second/train"},
                what="Response tokens per second while sampling and while training.",
            ),
            Chart(
                "Work of sampling",
                "tokens/decoded",
                {"decoded": "tokens/decoded", "prefilled": "tokens/prefilled"},
                what="Tokens the sampler ran through the model one at a time and in parallel.",
            ),
            Chart("Seconds by phase", "time/<phase>"),
        ),
    ),
)

_LAYERS = "One line per layer; of more than six some from the first to the last, and the range over all of them."
# Charts of single methods. A section is left out of the report of a run that logged none of its keys.
METHOD_CHARTS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Perturbation",
        (
            Chart(
                "Noise σ of each layer",
                "perturbation/sigma/<layer>",
                kind="layers",
                what=f"Learned standard deviation of the noise on a layer's input. {_LAYERS}",
            ),
            Chart(
                "Entries the noise changed",
                "perturbation/changed/<layer>",
                kind="layers",
                what=f"Share of the entries going into the matrix products after a layer's norm. {_LAYERS}",
            ),
            Chart("Change of log-probs", "perturbation/dlogp"),
            Chart("Upper quartile of |Δp|", "perturbation/dp_q75"),
        ),
    ),
    (
        "Prefixes",
        (
            Chart("Tokens of an older policy", "prefix/tokens"),
            Chart("Length of the prefixes", "prefix/length"),
            Chart("Age of the prefixes", "prefix/age"),
        ),
    ),
    (
        "Episodes",
        (
            Chart("Calls of a response", "episode/calls"),
            Chart(
                "Calls and responses that go wrong",
                "episode/void",
                {"tool errors": "episode/tool_errors", "void": "episode/void"},
                each=True,
                what="Share of calls whose result is an error, and of responses that end in neither call nor answer.",
            ),
            Chart("Responses without an episode", "episode/failed"),
            Chart(
                "Length with results", "length/episode", {"with results": "length/episode", "sampled": "length/mean"}
            ),
        ),
    ),
    (
        "Demonstrations",
        (
            Chart(
                "Demonstrations of the step",
                "expert/traces",
                {"joined": "expert/traces", "too long": "expert/dropped", "prompts without": "expert/missing"},
                shade=False,
                what="Demonstrations joined to the groups, left out as longer than the context, and missing.",
            ),
            Chart("Tokens of demonstrations", "off_policy/tokens"),
        ),
    ),
    (
        "Routing replay",
        (
            Chart(
                "Experts the trainer would have chosen",
                "routing/agreement",
                what="Share of tokens and layers whose replayed experts are those of the trainer's own routers.",
            ),
        ),
    ),
)
