"""Chooses where a historical response is cut, for the current policy to continue (SOUP, arXiv 2601.21476, 3.2).

Pure numpy. A rule looks at a response and says how many of its tokens the prefix keeps; `cut` then makes the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trimtab.errors import TrimtabError, nearest
from trimtab.plugins import check_arguments, load_function
from trimtab.types import Completion, FloatArray, IntArray, cut

# (response ids, entropy in nats or None, a number in [0, 1) to choose with) -> tokens to keep
Place = Callable[[IntArray, FloatArray | None, float], int]

_ARGUMENTS = {"response_ids": "array", "entropy": "array or None", "uniform": "float"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A truncation rule. `whole`: it must see the whole historical response, so a token budget cannot replace it."""

    name: str
    place: Place
    whole: bool

    def prefix(self, completion: Completion, uniform: float) -> Completion:
        """The part of a whole response this rule keeps.

        Raises:
            TrimtabError: the rule's answer is not a number of tokens that leaves at least one to sample again.
        """
        n = len(completion.response_ids)
        kept = self.place(completion.response_ids, completion.entropy, uniform)
        if isinstance(kept, bool) or not isinstance(kept, int | np.integer) or not 0 <= kept < max(n, 1):
            raise TrimtabError(
                f"prefix rule {self.name!r} answered {kept!r} for a response of {n} tokens; "
                f"it must return how many to keep, an int from 0 to {max(n - 1, 0)}"
            )
        return cut(completion, int(kept))


def build(rule: str, *, ratio: float, top: int, whole: bool) -> Rule:
    """`length`, `entropy`, or a user's own `module:function` of `Place`'s arguments.

    Args:
        ratio: share of the response that `length` keeps.
        top: how many positions of highest entropy `entropy` chooses from (the paper's K = 32).
        whole: `length` looks at whole responses, instead of sampling no more than a budget of tokens.

    Raises:
        TrimtabError: an unknown rule, or a function that cannot be loaded or takes other arguments.
    """
    if rule == "length":
        return Rule(rule, lambda ids, _entropy, _uniform: portion(ratio, len(ids)), whole)
    if rule == "entropy":
        return Rule(rule, lambda _ids, entropy, uniform: before_high_entropy(entropy, uniform, top), True)
    if ":" not in rule:
        raise TrimtabError(
            f"unknown prefix rule {rule!r}{nearest(rule, ['length', 'entropy'])}, or write module:function"
        )
    function = load_function(rule, "prefix rule")
    check_arguments(function, f"prefix rule {rule!r}", _ARGUMENTS)

    def place(ids: IntArray, entropy: FloatArray | None, uniform: float) -> int:
        try:
            return function(ids, entropy, uniform)
        except Exception as error:
            raise TrimtabError(f"prefix rule {rule!r} failed: {type(error).__name__}: {error}") from error

    return Rule(rule, place, True)


def portion(ratio: float, length: float) -> int:
    """floor(ratio * length), where a product that is whole but for rounding (0.29 * 100) counts as whole."""
    return math.floor(ratio * length + 1e-9)


def before_high_entropy(entropy: FloatArray | None, uniform: float, top: int) -> int:
    """Tokens before a uniformly chosen one of the `top` positions of highest entropy; that token is sampled again.

    All positions where the response has fewer. Earlier positions win ties.

    Raises:
        TrimtabError: the engine reported no entropy.
    """
    if entropy is None:
        raise TrimtabError('prefix rule "entropy" needs entropies, which this engine does not report; use "length"')
    highest = np.argsort(-entropy, kind="stable")[:top]
    return int(highest[int(uniform * len(highest))]) if len(highest) else 0
