"""Detects `raw-logprobs` from entropies and near-certain tokens where the ratio does not show it.

When trainer and sampler agree, both may describe another distribution q than the one that tokens were sampled from.
There are three indications:

  * the entropy column: for tokens from q the mean of -log q is H(q). The column is that of q, or of the sampling
    distribution r = q^a; a is estimated from near-certain tokens, where probability and entropy determine each other.
    If it is q's, any difference counts. If it is r's, the difference is KL(r || q), of second order in a - 1; a
    first-order difference means that the column has another temperature than the tokens, not that log-probs are raw;
  * an entropy of exactly 0 with a log-prob below 0: the only token of its sampling mask, which the log-prob ignores;
  * with a known top_p < 1, log-probs just below 0: such a token is alone in its sampling mask and has exactly 0 in
    processed log-probs.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, logit, share, z_of
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS


def find_undeclared_raw(tokens: LogprobPairs) -> tuple[float, str] | None:
    """Returns confidence and evidence that the log-probs are not those of the sampling distribution, or None."""
    return _by_zeros(tokens) or _by_entropy(tokens)


def _by_zeros(tokens: LogprobPairs) -> tuple[float, str] | None:
    top_p = tokens.of_response(tokens.table.top_p)
    if top_p is None:
        return None
    cut = top_p < 0.995
    zeros = (tokens.behavior > -1e-7) & cut
    # float32 distinguishes these from 0, and no sampling mask of two tokens leaves one so close to it.
    near = (tokens.behavior < -1e-6) & (tokens.behavior > 0.5 * np.log(np.where(cut, top_p, 0.5))) & cut
    if near.sum() < 20 or 3 * zeros.sum() > near.sum():
        return None
    evidence = (
        f"under top_p = {float(np.median(top_p[cut])):g} a token this likely is alone in its set and has log-prob 0, "
        f"but {int(near.sum())} tokens are just below 0 and {int(zeros.sum())} at 0: these are the model's own"
    )
    return 0.9, evidence


def _by_entropy(tokens: LogprobPairs) -> tuple[float, str] | None:
    if tokens.entropy is None:
        return None
    known = np.isfinite(tokens.entropy)
    k3 = float((np.expm1(np.clip(tokens.log_ratio, -20, 20)) - tokens.log_ratio).mean())
    if known.sum() < 100 or k3 > LIMITS["raw-k3"]:
        return None
    behavior, entropy = tokens.behavior[known], tokens.entropy[known]
    surprise = -behavior - entropy
    mean, z = float(surprise.mean()), z_of(surprise)
    single = (entropy < 1e-6) & (behavior < -1e-3)
    if single.sum() >= 10 and share(single) > 0.005:
        return 0.9, (
            f"the entropy column is 0 for {int(single.sum())} tokens that the log-probs call uncertain: tokens were "
            "drawn from a truncated distribution, not from the one reported"
        )
    if abs(mean) < LIMITS["raw-surprise"] + 0.02 * float(entropy.mean()) + 5 * k3 or abs(z) < LIMITS["raw-z"]:
        return None
    exponent = _exponent(behavior, entropy)
    if exponent is None or exponent < 1 / LIMITS["raw-exponent"]:
        return None
    second = LIMITS["raw-second-order"] * max(exponent - 1, 0.0) ** 1.5 * float(behavior.var())
    if exponent > LIMITS["raw-exponent"] and (not 0 < mean < second or _is_hot(tokens)):
        return None
    shape = "flatter" if exponent <= LIMITS["raw-exponent"] and mean > 0 else "sharper"
    evidence = (
        f"tokens are {mean:+.3f} nats more surprising than the entropy column says (z = {z:.1f}): they were drawn from "
        f"a {shape} distribution than the one reported"
    )
    return 0.8, evidence


def _is_hot(tokens: LogprobPairs) -> bool:
    """Whether the file's sampling temperature is above 1."""
    temperature = tokens.table.temperature
    return temperature is not None and bool(np.nanmedian(temperature) > 1)


def _exponent(behavior: np.ndarray, entropy: np.ndarray) -> float | None:
    """Returns a, where the entropy column is that of (reported distribution)^a; None with too few tokens.

    Estimated from near-certain tokens of probability 1 - e, whose entropy is h(e) + e h with h about 1.
    """
    doubt = np.geomspace(1e-7, 0.5, 400)
    whole = -(1 - doubt) * np.log1p(-doubt) - doubt * np.log(doubt) + doubt
    use = (behavior > np.log(0.9)) & (behavior < -1e-4) & (entropy > whole[0])
    if use.sum() < 10:
        return None
    implied = -np.log(np.interp(entropy[use], whole, doubt))
    return float(np.median(implied / logit(behavior[use])))
