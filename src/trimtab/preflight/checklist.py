"""The checks of a sampler and a trainer, in the order of `CHECKS`, and `run_checks`, which runs all of them.

Each check takes the pair and its responses by length, and returns a `Check` without a name. All checks use one set of
weights, except `check_weights` (weight_checks.py), which changes the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from trimtab.diagnosis.causes.detector import judge_mean
from trimtab.diagnosis.causes.search import NOISES, find_causes
from trimtab.diagnosis.measure import measure
from trimtab.diagnosis.records import CAUSES, DataSummary, Measured
from trimtab.diagnosis.tokens import TokenTable, excess, k3
from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.preflight.engine_pair import EXACT, MARGIN, Check, EnginePair, ScoredResponses, common_log_ratio
from trimtab.preflight.weight_checks import check_weights
from trimtab.text import short
from trimtab.trainer.chat_template import render

TOKENS = 1024
"""Tokens that are sampled for each length, in 2 to 16 responses."""
BATCHES = (8, 64)
PROBES, PROBE_TOKENS = 8, 16
"""Default number of responses in a check, and of tokens in each response."""
IMPOSSIBLE_CAUSES = ("copied",)
"""Causes that this data cannot have: the trainer has no access to the sampler's log-probs."""
CONFIDENT = 0.5
"""A cause fails a check only with at least this confidence."""
OTHER_TEMPERATURE = 0.7
"""Temperature in `check_sampling_settings` if 1 without truncation is configured: raw and processed agree there."""
END_MARGIN = 30
"""Allowed ratio of the k3 of end tokens, which are few, to the larger of the bound and the k3 of other tokens."""
PARTS = {
    "decode/prefill": (
        "decode differs from prefill: cache or decode kernels",
        "compare without CUDA graphs, prefix caching and a quantized key-value cache (vLLM: enforce_eager, "
        "enable_prefix_caching=False, kv_cache_dtype=auto)",
    ),
    "prefill/trainer": (
        "prefill differs from the trainer: weights or numerics of the engine",
        "see weights and distribution; compare dtypes, attention implementations and the model's config",
    ),
}
"""What is wrong, and what to do, if two computations of log-probs differ. Ratios of the key "a/b" are b over a."""
WHOLE = "decode/trainer"


@dataclass(frozen=True, eq=False)
class Preflight:
    """The result: checks in order, and the responses by length that the first check measured."""

    facts: Mapping[str, str]
    bound: float
    checks: Sequence[Check]
    samples: Mapping[int, ScoredResponses]

    @property
    def ok(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        failed = [check.name for check in self.checks if check.status == "fail"]
        if failed:
            return f"not fit to train: {', '.join(failed)}"
        noted = [check.name for check in self.checks if check.status == "note"]
        return "fit to train" + (f"; see {', '.join(noted)}" if noted else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "bound": self.bound,
            **self.facts,
            "lengths": {str(length): one.k3 for length, one in self.samples.items()},
            "checks": [asdict(check) for check in self.checks],
        }


def run_checks(
    pair: EnginePair,
    lengths: Sequence[int],
    facts: Mapping[str, str],
    on_progress: Callable[[str], None],
    on_check: Callable[[Check], None] = lambda _: None,
) -> Preflight:
    """Publishes the trainer's weights and runs the checks, up to the one in which the engine dies.

    A check that raises `TrimtabError` counts as failed. lengths: of responses in tokens, cut to the context.
    on_progress: called with the name of the next step. on_check: called with each finished check.
    """
    pair.publish()
    samples: dict[int, ScoredResponses] = {}
    for length in sorted({pair.room(pair.prompts, length) for length in lengths}):
        on_progress(f"responses of {length} tokens")
        prompts = pair.prompts[: max(2, min(16, TOKENS // length))]
        samples[length] = pair.compare(prompts, length)
    found: list[Check] = []
    for name, check in CHECKS.items():
        on_progress(name)
        dead = False
        try:
            outcome = check.run(pair, samples)
        except TrimtabError as error:
            outcome, dead = Check("fail", str(error)), isinstance(error, EngineDeadError)
        found.append(replace(outcome, name=name))
        on_check(found[-1])
        if dead:
            break
    return Preflight(facts, pair.bound, found, samples)


def measured_of(*parts: ScoredResponses) -> Measured:
    """Returns size, location and placeholders of the mismatch, measured as by `trimtab diagnose`."""
    table = TokenTable.concat([part.table() for part in parts])
    summary = DataSummary("trimtab", 0, table.responses, table.tokens, table.tokens, "proximal")
    return measure([table], lambda: summary)


def check_mismatch(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Check:
    """Checks k3 of each length, that the mean ratio is 1, and that the tokens show no fault known to diagnosis."""
    sizes = {length: measured_of(one).size.mismatch for length, one in samples.items()}
    whole = measured_of(*samples.values())
    causes = [cause for cause in find_causes(whole, IMPOSSIBLE_CAUSES) if cause.confidence >= CONFIDENT]
    faults = [cause for cause in causes if cause.name not in NOISES]
    figures = {f"k3/{length}": size["k3"] for length, size in sizes.items()}
    total = whole.size.mismatch
    shown = ("k3", "ratio_mean", "ratio_q01", "ratio_q99", "ess_token", "abs_diff_max")
    figures |= {name: total[name] for name in shown}
    lengths = ", ".join(f"{short(size['k3'])} at {length} tokens" for length, size in sizes.items())
    detail = (
        f"k3 {lengths} (bound {short(pair.bound)}); mean ratio {total['ratio_mean']:.5g}; largest difference "
        f"{short(total['abs_diff_max'])} nats"
    )
    if faults:
        named = "; ".join(f"{cause.name}: {cause.evidence}" for cause in faults)
        return Check("fail", f"{detail}; {named}", faults[0].fix, figures)
    if not max(size["k3"] for size in sizes.values()) <= pair.bound:
        fix = causes[0].fix if causes else CAUSES["unexplained"].fix
        named = f"; it looks like {causes[0].name}" if causes else ""
        return Check("fail", f"{detail}{named}", fix, figures)
    return Check("ok", detail, "", figures)


def check_prefill(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Check:
    """Compares the log-probs from decoding, from a prefill of the same ids in the sampler, and from the trainer.

    If decode and prefill differ, the cause is in what only decoding uses: the key-value cache and its kernels. If
    prefill and trainer differ, the cause is in the weights or the numerics of the engine. All are computed at
    temperature 1, since inference engines ignore the temperature in a prefill.
    """
    if (score := getattr(pair.engine, "prefill_logps", None)) is None:
        return Check("note", "skipped: this sampler cannot score given responses")
    parts = list(samples.values())
    if pair.sampling.temperature != 1:
        longest = max(samples)
        parts = [pair.compare(samples[longest].prompts, longest, temperature=1.0)]
    logps = []
    for part in parts:
        # vLLM and servers score the ids as a prompt, which must leave room for one more token.
        pieces = [
            one if pair.context is None else one.truncated(max(1, pair.context - 1 - len(prompt.ids)))
            for prompt, one in zip(part.prompts, part.completions, strict=True)
        ]
        try:
            rows = score(part.prompts, pieces)
        except EngineDeadError:
            raise
        except TrimtabError as error:
            return Check("note", f"skipped: {error}")
        pairs = zip(pieces, rows, part.logp_trainer, strict=True)
        logps += [(one.logp_behavior, row, trainer[: len(row)]) for one, row, trainer in pairs]
    decode, again, trainer = (np.concatenate(column).astype(np.float64) for column in zip(*logps, strict=True))
    return prefill_verdict(pair.bound, {"decode/prefill": again - decode, "prefill/trainer": trainer - again})


def prefill_verdict(bound: float, log_ratios: Mapping[str, np.ndarray]) -> Check:
    """Returns the outcome, which names the part whose k3 is beyond the bound or whose mean ratio cannot be 1.

    log_ratios: (tokens,) for each key of `PARTS`. Decoding sampled the tokens: ratios over decode have the mean 1.
    """
    every = {**log_ratios, WHOLE: sum(log_ratios.values())}
    sizes = {name: float(k3(np.asarray(values)).mean()) for name, values in every.items()}
    means = {name: float(np.exp(values).mean()) for name, values in every.items()}
    figures = {f"k3/{name}": size for name, size in sizes.items()}
    figures |= {f"ratio_mean/{name}": mean for name, mean in means.items()}
    detail = "; ".join(f"{name} k3 {short(sizes[name])}, mean ratio {means[name]:.5g}" for name in sizes)
    decode = next(iter(PARTS))
    shifted = [name for name in (decode, WHOLE) if judge_mean(excess(np.asarray(every[name]))) == "no"]
    if all(size <= bound for size in sizes.values()) and not shifted:
        return Check("ok", detail, "", figures)
    beyond = [name for name in PARTS if not sizes[name] <= bound or name in shifted]
    beyond = beyond or [max(PARTS, key=lambda name: sizes[name])]
    found, advice = ("; ".join(texts) for texts in zip(*(PARTS[name] for name in beyond), strict=True))
    return Check("fail", f"{detail}; {found}", advice, figures)


def check_distribution(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Compares the log-probs of all ids or of the most probable ids, not only of the sampled ids."""
    prompts = pair.prompts[:PROBES]
    completions = pair.sample(prompts, PROBE_TOKENS, top_logprobs=pair.top_logprobs)
    tops = [one.top for one in completions]
    lists = [top for top in tops if top is not None]
    if len(lists) < len(tops):
        return Check("note", "not checked: the sampler returns log-probs of sampled tokens only")
    scored = pair.score(prompts, completions, further=[top.ids for top in lists])
    sampler, trainer = (
        np.concatenate(parts).astype(np.float64) for parts in ([top.logps for top in lists], scored.further)
    )
    sampled = np.concatenate([one.response_ids for one in completions])
    reported = np.concatenate([one.logp_behavior for one in completions])
    ids = np.concatenate([top.ids for top in lists])
    known = np.isfinite(sampler)
    terms = np.exp(sampler) * k3(np.where(known, trainer - sampler, 0.0))
    divergence = float(np.where(known, terms, 0.0).sum(1).mean())
    agreement = float((np.where(known, trainer, -np.inf).argmax(1) == sampler.argmax(1)).mean())
    shown = "all ids" if pair.top_logprobs >= pair.vocabulary else f"the {pair.top_logprobs} most probable ids"
    figures = {"divergence": divergence, "top1_agreement": agreement, "ids": float(ids.shape[1])}
    detail = (
        f"divergence {short(divergence)} nats per token over {shown}; the most probable id agrees at {agreement:.1%}"
    )
    own = np.where(ids == sampled[:, None], sampler, -np.inf).max(1)
    # Most engines put the sampled token first in the list of log-probs; a wrong index takes the most probable one.
    is_top = (np.abs(sampler.max(1) - reported) < 1e-3) & (np.abs(own - reported) > 1e-2)
    if is_top.any():
        detail += (
            f"; at {is_top.mean():.0%} of the tokens the sampler reports the log-prob of the most probable id instead"
        )
        return Check("fail", f"{detail} (wrong-token)", CAUSES["wrong-token"].fix, figures)
    if not divergence <= max(pair.bound, EXACT):  # invariant numerics are promised for sampled tokens only
        return Check("fail", detail, "compare weights, dtypes and temperatures", figures)
    return Check("ok", detail, "", figures)


def check_batch_sizes(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Checks whether a response has the same log-probs alone and in a batch."""
    alone = [pair.sample([prompt], PROBE_TOKENS)[0] for prompt in pair.prompts[:2]]
    figures, words = {}, []
    for size in BATCHES:
        together = []
        for place in range(len(alone)):  # first in its batch, the prompt draws the same random numbers
            others = [prompt for number, prompt in enumerate(pair.prompts) if number != place][: size - 1]
            together.append(pair.sample([pair.prompts[place], *others], PROBE_TOKENS)[0])
        figures[f"k3/{size}"], text = _difference(common_log_ratio(alone, together))
        words.append(f"{text} in a batch of {size}")
    detail = f"against a response alone: {', '.join(words)}"
    if max(figures.values()) <= pair.bound:
        return Check("ok", detail, "", figures)
    advice = (
        "use batch-invariant kernels (vLLM: VLLM_BATCH_INVARIANT=1 on a GPU; SGLang: --enable-deterministic-inference; "
        'Trimtab: numerics = "invariant")'
    )
    return Check("fail", detail, advice, figures)


def check_prefix_cache(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Checks repeated prompts, whose prefix is cached, and responses that continue a prefix."""
    prompts = pair.prompts[:PROBES]
    pair.publish()  # empties the cache
    cold, warm = pair.sample(prompts, PROBE_TOKENS), pair.sample(prompts, PROBE_TOKENS)
    half = [one.truncated(len(one.response_ids) // 2) for one in cold]
    sizes = []
    for completions in (pair.sample(prompts, PROBE_TOKENS, half), cold):
        rows = zip(pair.score(prompts, completions).by_response, half, strict=True)
        sizes.append(float(k3(np.concatenate([row[len(start.response_ids) :] for row, start in rows])).mean()))
    again, text = _difference(common_log_ratio(cold, warm))
    figures = {"k3/again": again, "k3/continued": sizes[0], "k3/plain": sizes[1]}
    detail = (
        f"prompts asked again: {text}; tokens after a given half: k3 {short(sizes[0])} against the trainer, "
        f"{short(sizes[1])} without it"
    )
    if again <= pair.bound and sizes[0] <= max(pair.bound, MARGIN * sizes[1]):
        return Check("ok", detail, "", figures)
    advice = "compare with prefix caching off (vLLM: enable_prefix_caching=False, SGLang: --disable-radix-cache)"
    return Check("fail", detail, advice, figures)


def _difference(log_ratio: np.ndarray) -> tuple[float, str]:
    """Returns k3 between two computations of the same log-probs, and its text; infinite if there is no token."""
    if not len(log_ratio):
        return np.inf, "no token in common"
    size = float(k3(log_ratio).mean())
    return size, f"k3 {short(size)}" if np.any(log_ratio) else "equal to the bit"


def check_sampling_settings(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Checks whether the log-probs describe the sampled distribution or the distribution of the raw logits."""
    configured, prompts = pair.sampling, pair.prompts[:PROBES]
    neutral = configured.temperature == 1 and not configured.truncated
    temperature = OTHER_TEMPERATURE if neutral else configured.temperature
    changes = {"temperature": temperature, "top_p": configured.top_p, "top_k": configured.top_k}
    completions = pair.sample(prompts, PROBE_TOKENS, **changes)
    reported = np.concatenate([one.logp_behavior for one in completions])
    readings = {"processed": (temperature, configured.truncated), "raw": (1.0, False)}
    if configured.truncated:
        readings["before truncation"] = (temperature, False)
    distances = {}
    for name, (divisor, kept) in readings.items():
        logp = np.concatenate(pair.score(prompts, completions, divisor, kept=kept).logp_trainer)
        distances[name] = float(np.abs(logp - reported).mean())
    nearest = min(distances, key=lambda name: distances[name])
    settings = f"temperature {temperature:g}, top_p {configured.top_p:g}, top_k {configured.top_k}"
    shown = ", ".join(f"{short(value)} nats from {name}" for name, value in distances.items())
    detail = f"at {settings} the log-probs are {nearest}: {shown}"
    figures = {f"distance/{name}": value for name, value in distances.items()}
    if nearest == "processed":
        return Check("ok", detail, "", figures)
    cause = "raw-logprobs" if nearest == "raw" else "truncated-sampling"
    if neutral:
        return Check("note", f"{detail}; at temperature 1, as configured, both agree", "", figures)
    return Check("fail", f"{detail} ({cause})", CAUSES[cause].fix, figures)


def check_end_tokens(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Checks the tokens that end responses, the log-probs there, and that padding does not matter in the trainer."""
    prompts = pair.prompts[:PROBES]
    scored = pair.compare(prompts, 4 * PROBE_TOKENS, ignore_stop=False)
    faults, ends, others = _template_faults(pair), [], []
    for number, one in enumerate(scored.completions):
        inside = np.isin(one.response_ids[:-1], list(pair.stop_ids))
        if inside.any():
            faults.append(f"response {number} goes on after end token {int(one.response_ids[:-1][inside][0])}")
        log_ratio = scored.by_response[number]
        if one.finish_reason == "stop":
            ends.append((int(one.response_ids[-1]), log_ratio[-1]))
            log_ratio = log_ratio[:-1]
        others.append(log_ratio)
    if wrong := sorted({token for token, _ in ends} - pair.stop_ids):
        names = ", ".join(f"{token} ({pair.tokenizer.decode([token])!r})" for token in wrong)
        faults.append(
            f"responses end with token {names}, which is none of the model's end tokens {sorted(pair.stop_ids)}"
        )
    far = float(k3(np.array([difference for _, difference in ends])).mean()) if ends else 0.0
    if not far <= END_MARGIN * max(pair.bound, float(k3(np.concatenate(others)).mean())):
        faults.append(f"k3 {short(far)} at the end tokens: the trainer scores another end than was sampled")
    for one in measured_of(scored).placeholders:
        faults.append(f"placeholder {one.value:g} in place of {one.tokens} log-probs ({one.column}, {one.place})")
    padding = _padding_effect(pair, scored)
    if not padding <= pair.bound:
        faults.append(
            f"padding changes the trainer's log-probs (k3 {short(padding)}): check attention mask and positions"
        )
    figures = {"ended": float(len(ends)), "k3/end": far, "k3/padding": padding}
    summary = f"{len(ends)} of {len(prompts)} responses ended, k3 {short(far)} there; padding k3 {short(padding)}"
    if faults:
        fix = "give sampler and trainer the end tokens of the chat template, and train on the ids that were sampled"
        return Check("fail", "; ".join(dict.fromkeys(faults)), fix, figures)
    return Check("ok" if ends else "note", summary, "", figures)


def _template_faults(pair: EnginePair) -> list[str]:
    """Returns what is wrong with the special tokens of the chat template and of the prompts."""
    faults, tokenizer = [], pair.tokenizer
    special = set(tokenizer.all_special_ids)
    if getattr(tokenizer, "chat_template", None):
        try:
            text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except TrimtabError as error:
            return [str(error)]
        ids = tokenizer(text.rpartition("b")[2], add_special_tokens=False)["input_ids"]
        end = next((token for token in ids if token in special), None)
        if end is not None and end not in pair.stop_ids:
            name = tokenizer.decode([end])
            faults.append(f"the chat template ends an answer with {end} ({name!r}), where the sampler does not stop")
    start = tokenizer.bos_token_id
    if start is not None and any(len(one.ids) > 1 and one.ids[0] == one.ids[1] == start for one in pair.prompts):
        faults.append(
            "prompts begin with two beginning-of-text tokens: the template has one, the tokenizer adds another"
        )
    return faults


def _padding_effect(pair: EnginePair, scored: ScoredResponses) -> float:
    """Returns k3 between the trainer's log-probs of the shortest response alone and in the whole batch."""
    pairs = zip(scored.prompts, scored.completions, strict=True)
    shortest = int(np.argmin([len(prompt.ids) + len(one.response_ids) for prompt, one in pairs]))
    alone = pair.score([scored.prompts[shortest]], [scored.completions[shortest]], scored.temperature)
    return float(k3(alone.logp_trainer[0] - scored.logp_trainer[shortest]).mean())


def check_training_mode(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Check:
    """Compares training and evaluation mode of the trainer: before any update the ratio must be 1."""
    shortest = samples[min(samples)]
    prompts, completions = shortest.prompts[:2], shortest.completions[:2]
    was_training = pair.model.training
    passes = []
    for training in (True, False):
        pair.model.train(training)
        passes.append(np.concatenate(pair.score(prompts, completions).logp_trainer))
    pair.model.train(was_training)
    size = float(k3(passes[0] - passes[1]).mean())
    detail, figures = f"k3 {short(size)} between training and evaluation mode of the trainer", {"k3/modes": size}
    if size <= pair.bound:
        return Check("ok", detail, "", figures)
    return Check("fail", detail, "switch dropout off: the first ratio must be 1", figures)


class CheckOfPair(NamedTuple):
    """The question that a check answers, as the page prints it, and the check."""

    question: str
    run: Callable[[EnginePair, Mapping[int, ScoredResponses]], Check]


CHECKS: Mapping[str, CheckOfPair] = {
    "mismatch": CheckOfPair("Do both sides give a sampled token the same probability?", check_mismatch),
    "prefill": CheckOfPair("Is it the sampler's decoding that differs, or the engine?", check_prefill),
    "distribution": CheckOfPair("And the tokens that were not sampled?", check_distribution),
    "batch sizes": CheckOfPair("Does a response depend on what runs beside it?", check_batch_sizes),
    "prefix cache": CheckOfPair("Does a cached prompt change the answer?", check_prefix_cache),
    "sampling settings": CheckOfPair(
        "Are the log-probs those of the distribution that is sampled?", check_sampling_settings
    ),
    "weights": CheckOfPair("Do all new weights arrive in the sampler?", check_weights),
    "end tokens": CheckOfPair("Do both sides agree where a response ends, and on padding?", check_end_tokens),
    "training mode": CheckOfPair("Does the trainer score as it trains?", check_training_mode),
}
