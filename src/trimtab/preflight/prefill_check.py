"""Tells the sampler's decoding from its prefill: which of the two differs from the trainer.

The sampler scores the ids that it sampled once more, as a prompt. Decode against prefill shows what only decoding has:
the key-value cache and its kernels. Prefill against trainer shows the engine: its weights and its numerics.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trimtab.diagnosis.causes.detector import contract
from trimtab.diagnosis.tokens import excess, k3
from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.pages.numbers import short
from trimtab.preflight.engine_pair import Check, EnginePair, ScoredResponses

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
"""What is wrong, and what to do, where the two sides of a pair differ. Ratios are second over first."""
WHOLE = "decode/trainer"


def prefill(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Check:
    """Compares log-probs of decoding, of the sampler's prefill and of the trainer at the same tokens.

    At temperature 1, since inference engines ignore the temperature in a prefill.
    """
    score = getattr(pair.engine, "prefill_logps", None)
    if score is None:
        return Check("note", "prefill", "skipped: this sampler cannot score given responses")
    parts = list(samples.values())
    if pair.sampling.temperature != 1:
        longest = max(samples)
        parts = [pair.compare(samples[longest].prompts, longest, temperature=1.0)]
    logps = []
    for part in parts:
        # vLLM and servers score a prompt, which must leave room for one more token.
        pieces = [
            one if pair.context is None else one.truncated(max(1, pair.context - 1 - len(prompt.ids)))
            for prompt, one in zip(part.prompts, part.completions, strict=True)
        ]
        try:
            rows = score(part.prompts, pieces)
        except EngineDeadError:
            raise
        except TrimtabError as error:
            return Check("note", "prefill", f"skipped: {error}")
        pairs = zip(pieces, rows, part.logp_trainer, strict=True)
        logps += [(one.logp_behavior, row, trainer[: len(row)]) for one, row, trainer in pairs]
    decode, again, trainer = (np.concatenate(column).astype(np.float64) for column in zip(*logps, strict=True))
    return verdict(pair.bound, {"decode/prefill": again - decode, "prefill/trainer": trainer - again})


def verdict(bound: float, log_ratios: Mapping[str, np.ndarray]) -> Check:
    """Names the part that makes a difference beyond the bound, or a mean ratio that cannot be 1.

    log_ratios: (tokens,) of each pair of `PARTS`. Decoding sampled the tokens: ratios over it have the mean 1.
    """
    every = {**log_ratios, WHOLE: sum(log_ratios.values())}
    sizes = {name: float(k3(np.asarray(values)).mean()) for name, values in every.items()}
    means = {name: float(np.exp(values).mean()) for name, values in every.items()}
    figures = {f"k3/{name}": size for name, size in sizes.items()}
    figures |= {f"ratio_mean/{name}": mean for name, mean in means.items()}
    detail = "; ".join(f"{name} k3 {short(sizes[name])}, mean ratio {means[name]:.5g}" for name in sizes)
    decode = next(iter(PARTS))
    shifted = [name for name in (decode, WHOLE) if contract(excess(np.asarray(every[name]))) == "outside"]
    if all(size <= bound for size in sizes.values()) and not shifted:
        return Check("ok", "prefill", detail, "", figures)
    beyond = [name for name in PARTS if not sizes[name] <= bound or name in shifted]
    beyond = beyond or [max(PARTS, key=lambda name: sizes[name])]
    found, advice = ("; ".join(texts) for texts in zip(*(PARTS[name] for name in beyond), strict=True))
    return Check("fail", "prefill", f"{detail}; {found}", advice, figures)
