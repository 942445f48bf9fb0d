"""Finds `raw-logprobs` where the ratio does not show it: trainer and sampler both report another distribution.

Tokens were then sampled from another distribution than the one that both sides describe, q. Indications are:

  * the file marks log-probs as raw although temperature or truncation changed the sampling;
  * with a known top_p < 1, log-probs just below 0: such a token is alone in its sampling mask and has exactly 0 in
    processed log-probs;
  * an entropy of exactly 0 with a log-prob below 0: the only token of its sampling mask, which the log-prob ignores;
  * the entropy column: for tokens from q the mean of -log q is H(q). The column is that of q, or of the sampling
    distribution r = q^a; a is estimated from near-certain tokens, where probability and entropy determine each other.
    If it is q's, any difference counts. If it is r's, the difference is KL(r || q), of second order in a - 1; a
    first-order difference means that the column has another temperature than the tokens, not that log-probs are raw.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import share, z_of
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs, logit
from trimtab.diagnosis.tokens import TokenTable

MAX_K3 = 0.02  # largest k3 for which entropies are compared
MIN_EXCESS = 0.004  # nats by which tokens are more surprising than their entropy, at least
EXCESS_Z = 6.0  # standard errors of that mean excess
MAX_EXPONENT = 1.1  # exponent up to which the entropy column is that of the reported log-probs
SECOND_ORDER = 0.34  # coefficient of the KL divergence of two temperatures [computed]

Raw = tuple[float, str]
"""Confidence and evidence that log-probs are not those of the sampling distribution."""


def declared_raw(table: TokenTable) -> Raw | None:
    """Returns whether the file says so."""
    if table.raw is None:
        return None
    processed = np.zeros(table.responses, dtype=bool)
    if table.temperature is not None:
        processed |= (table.temperature != 1) & np.isfinite(table.temperature)
    if table.top_p is not None:
        processed |= table.top_p < 1
    if table.top_k is not None:
        processed |= table.top_k > 0
    wrong = int((processed & table.raw.astype(bool)).sum())
    if not wrong:
        return None
    return 0.99, (
        f"the file marks the log-probs of {wrong} of {table.responses} responses as raw, and these were sampled at "
        "another temperature than 1 or from a truncated distribution"
    )


def undeclared_raw(tokens: LogprobPairs) -> Raw | None:
    """Returns whether exact zeros or entropies say so."""
    return _by_zeros(tokens) or _by_entropy(tokens)


def _by_zeros(tokens: LogprobPairs) -> Raw | None:
    top_p = tokens.of_response(tokens.table.top_p)
    if top_p is None:
        return None
    cut = top_p < 0.995
    zeros = (tokens.behavior > -1e-7) & cut
    # float32 distinguishes these from 0, and no sampling mask of two tokens leaves one so close to it.
    near = (tokens.behavior < -1e-6) & (tokens.behavior > 0.5 * np.log(np.where(cut, top_p, 0.5))) & cut
    if near.sum() < 20 or 3 * zeros.sum() > near.sum():
        return None
    return 0.9, (
        f"at top_p = {float(np.median(top_p[cut])):g} the sampler chooses among a single token where one is almost "
        f"certain, so that its log-prob is exactly 0; here {int(zeros.sum())} tokens are at 0 and {int(near.sum())} "
        "just below, so that log-probs are the model's before truncation"
    )


def _by_entropy(tokens: LogprobPairs) -> Raw | None:
    if tokens.entropy is None:
        return None
    known = np.isfinite(tokens.entropy)
    k3 = float(tokens.k3.mean())
    if known.sum() < 100 or k3 > MAX_K3:
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
    if abs(mean) < MIN_EXCESS + 0.02 * float(entropy.mean()) + 5 * k3 or abs(z) < EXCESS_Z:
        return None
    exponent = _exponent(behavior, entropy)
    if exponent is None or exponent < 1 / MAX_EXPONENT:
        return None
    second = SECOND_ORDER * max(exponent - 1, 0.0) ** 1.5 * float(behavior.var())
    temperature = tokens.table.temperature
    is_hot = temperature is not None and bool(np.nanmedian(temperature) > 1)
    if exponent > MAX_EXPONENT and (not 0 < mean < second or is_hot):
        return None
    shape = "flatter" if exponent <= MAX_EXPONENT and mean > 0 else "sharper"
    return 0.8, (
        f"the mean of -log-prob is {mean:+.3f} nats off the entropy column (z = {z:.1f}), where both are equal for "
        f"tokens of the reported distribution: they were drawn from a {shape} one"
    )


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
