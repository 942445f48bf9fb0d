"""Truncation rules: how many tokens of a historical response become a prefix (SOUP, arXiv 2601.21476, 3.2).

Pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.config import PrefixConfig
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import check_arguments, load_function
from trimtab.types import Completion, FloatArray, IntArray

# (response ids, entropy in nats or None, a uniform random number in [0, 1)) -> tokens to keep
Truncation = Callable[[IntArray, FloatArray | None, float], int]

_ARGUMENTS = {"response_ids": "array", "entropy": "array or None", "uniform": "float"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A truncation rule. `whole`: it needs the whole historical response, so sampling cannot stop at a budget."""

    name: str
    tokens_to_keep: Truncation
    whole: bool

    def prefix(self, completion: Completion, uniform: float) -> Completion:
        """Returns the prefix of a whole response.

        Raises:
            TrimtabError: the rule's result is not an int that leaves at least one token to sample.
        """
        n = len(completion.response_ids)
        kept = self.tokens_to_keep(completion.response_ids, completion.entropy, uniform)
        if isinstance(kept, bool) or not isinstance(kept, int | np.integer) or not 0 <= kept < max(n, 1):
            raise TrimtabError(
                f"prefix rule {self.name!r} answered {kept!r} for a response of {n} tokens; "
                f"it must return how many to keep, an int from 0 to {max(n - 1, 0)}"
            )
        return completion.truncated(int(kept))


def build(config: PrefixConfig) -> Rule:
    """Returns the rule of a recipe: `length`, `entropy`, or a user's `module:function` with `Truncation`'s arguments.

    Raises:
        TrimtabError: an unknown rule, or a function that cannot be loaded or takes other arguments.
    """
    rule, ratio, top = config.rule, config.ratio, config.top
    if rule == "length":
        return Rule(rule, lambda ids, _entropy, _uniform: prefix_tokens(ratio, len(ids)), config.whole)
    if rule == "entropy":
        return Rule(rule, lambda _ids, entropy, uniform: before_high_entropy(entropy, uniform, top), True)
    if ":" not in rule:
        raise TrimtabError(
            f"unknown prefix rule {rule!r}{did_you_mean(rule, ['length', 'entropy'])}, or write module:function"
        )
    function = load_function(rule, "prefix rule")
    check_arguments(function, f"prefix rule {rule!r}", _ARGUMENTS)

    def tokens_to_keep(ids: IntArray, entropy: FloatArray | None, uniform: float) -> int:
        try:
            return function(ids, entropy, uniform)
        except Exception as error:
            raise TrimtabError(f"prefix rule {rule!r} failed: {type(error).__name__}: {error}") from error

    return Rule(rule, tokens_to_keep, True)


def prefix_tokens(ratio: float, length: float) -> int:
    """floor(ratio * length), with a tolerance for products that are whole except for rounding (0.29 * 100)."""
    return math.floor(ratio * length + 1e-9)


def before_high_entropy(entropy: FloatArray | None, uniform: float, top: int) -> int:
    """Number of tokens before a random one of the `top` positions of highest entropy, which is sampled again.

    Uses all positions if the response has fewer. Ties go to earlier positions.

    Raises:
        TrimtabError: the engine reported no entropy.
    """
    if entropy is None:
        raise TrimtabError('prefix rule "entropy" needs entropies, which this engine does not report; use "length"')
    highest = np.argsort(-entropy, kind="stable")[:top]
    return int(highest[int(uniform * len(highest))]) if len(highest) else 0
