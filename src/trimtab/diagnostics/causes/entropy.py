"""Raw log-probs that nothing contradicts but the tokens themselves.

When trainer and sampler agree, both may still describe another distribution than the one tokens came from. Then

  * with an entropy column of the reported distribution, E[-log q + ...] shows it: a token from q has -log q of mean
    H(q). Whether the column is that of q can be told token by token: where q(y) = 1 - e, the rest of the mass has an
    entropy (H - h(e)) / e, which must lie between 0 and log V;
  * with a known top_p < 1, log-probs just below 0 show it: processed, such a token is alone and has exactly 0.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnostics.causes.evidence import Tokens, share, z_of

MOST_ENTROPY = 13.0  # log of a vocabulary of 440,000
QUIET, LEAST, DEEP = 0.02, 0.03, 6.0


def undeclared(tokens: Tokens) -> tuple[float, str] | None:
    """Confidence and evidence that the log-probs are not those of the sampling distribution."""
    return _by_zeros(tokens) or _by_entropy(tokens)


def _by_zeros(tokens: Tokens) -> tuple[float, str] | None:
    top_p = tokens.of_response(tokens.chunk.top_p)
    if top_p is None:
        return None
    cut = top_p < 0.995
    zeros = (tokens.behavior > -1e-7) & cut
    # Float32 still tells these from 0, and no kept set of two leaves a token so close to it.
    near = (tokens.behavior < -1e-6) & (tokens.behavior > 0.1 * np.log(np.where(cut, top_p, 0.5))) & cut
    if near.sum() < 20 or zeros.sum() > near.sum():
        return None
    evidence = (
        f"under top_p = {float(np.median(top_p[cut])):g} a token this likely is alone in its set and has log-prob 0, "
        f"but {int(near.sum())} tokens are just below 0 and {int(zeros.sum())} at 0: these are the model's own"
    )
    return 0.9, evidence


def _by_entropy(tokens: Tokens) -> tuple[float, str] | None:
    if tokens.entropy is None:
        return None
    known = np.isfinite(tokens.entropy)
    if known.sum() < 100 or float((np.expm1(tokens.log_ratio) - tokens.log_ratio).mean()) > QUIET:
        return None
    behavior, entropy = tokens.behavior[known], tokens.entropy[known]
    surprise = -behavior - entropy
    mean, z = float(surprise.mean()), z_of(surprise)
    if abs(mean) < LEAST or abs(z) < DEEP:
        return None
    rest = _rest(behavior, entropy)
    if len(rest) < 10:
        return None
    # Flatter than reported: the column belongs to another temperature and says nothing about the tokens.
    if share(rest > MOST_ENTROPY) > 0.1:
        return None
    below = share(rest < -0.05)
    drawn = "flatter" if below < 0.5 and mean > 0 else "sharper"
    evidence = (
        f"tokens are {mean:+.3f} nats more surprising than the entropy column says (z = {z:.1f}): they were drawn from "
        f"a {drawn} distribution than the one reported"
    )
    return 0.8, evidence


def _rest(behavior: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Entropy of what was not sampled, at tokens of probability 0.9 to 0.9999."""
    use = (behavior > np.log(0.9)) & (behavior < -1e-4)
    left = -np.expm1(behavior[use])
    own = -np.exp(behavior[use]) * behavior[use] - left * np.log(left)
    return (entropy[use] - own) / left
