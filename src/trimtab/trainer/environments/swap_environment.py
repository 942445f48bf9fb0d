"""The environment "swap", in which a row of digits is sorted by swapping two digits at a time, and its format."""

from __future__ import annotations

import re
from typing import Any

from trimtab.trainer.environments.formats import Call


class SwapEnvironment:
    """A row of digits, with a tool that swaps two digits. The reward is 1 if the final row is sorted, else 0."""

    def reset(self, **row: Any) -> None:
        """Begins with the digits of `row["question"]`."""
        self._digits = list(str(row["question"]))

    def swap(self, positions: str) -> str:
        """Swaps two digits and returns the row. Anything but two positions leaves it as it is.

        Args:
            positions: the two positions, counted from 1, as two digits: "14".
        """
        if len(positions) == 2 and set(positions) <= set("123456789"[: len(self._digits)]):
            first, second = (int(position) - 1 for position in positions)
            self._digits[first], self._digits[second] = self._digits[second], self._digits[first]
        return "".join(self._digits)

    def get_reward(self) -> float:
        return float(self._digits == sorted(self._digits))


class SwapFormat:
    """A compact format: a call is two positions and a question mark, "14?"; a result is the row and "=", "1342="."""

    stop = ("?",)

    def parse(self, text: str) -> Call | None:
        call = re.fullmatch(r"(\d*)\?", text)
        return None if call is None else Call("swap", {"positions": call[1]})

    def render(self, result: str) -> str:
        return f"{result}="
