"""The lines of a loss function in plain PyTorch, to which every part adds its own (`Objective.code`).

A part has `code(lines)` beside its `equation()`, and returns an expression. The names in it are those of the printed
function: its arguments (`current`, `behavior`, ...), (batch, time) and 0 at padding, and what is defined through
`Lines`.
"""

from __future__ import annotations

import math
import re

from trimtab.corrections.ratios import LOG_RATIO_BOUND, PER_TOKEN_LEVELS, TURN_LEVELS, Number

ARGUMENTS = (
    *("current", "proximal", "behavior", "reference", "entropy", "off_policy", "turn", "age"),
    *("head_current", "head_behavior", "mask", "advantage"),
)
"""What a printed function may read, in the order in which it takes them."""

WIDTH = 116
"""Of a line in a function of 120 columns."""

_SHARED = {
    "length": "mask.sum(1, keepdim=True).clamp(min=1)",
    "position": "mask.cumsum(1).clamp(min=1)  # 1 at the first trained token",
    "log_rho": "proximal - behavior",
}

_TAKEN = {*ARGUMENTS, *_SHARED, "ratio", "log_ratio", "token_log_ratio", "zero", "valid", "tokens", "responses"}
"""Names that a part may not give to something of its own."""


class Lines:
    """The body of a function: assignments, each name once.

    level, over: those of the objective's ratio. external: whether `off_policy` tokens have no proximal and behavior
    policy. rows: the lines.
    """

    def __init__(self, level: str, over: str, *, external: bool = False) -> None:
        self.level, self.over, self.external = level, over, external
        self.rows: list[str] = []
        self._defined: dict[str, str] = {}

    def define(self, name: str, expression: str) -> str:
        """Adds `name = expression`, which may end in a comment, and returns the name, numbered where it is taken."""
        free, number = name, 1
        while free in _TAKEN or self._defined.get(free, expression) != expression:
            number += 1
            free = f"{name}_{number}"
        return self._add(free, expression)

    def use(self, *names: str) -> None:
        """Defines what parts share: length and position (of trained tokens in the response), and ratios.

        Ratios: log_ratio and ratio, those of the objective, token_log_ratio (its tokens'), log_rho = log
        proximal/behavior.
        """
        for name in names:
            if name == "ratio":
                self._add(name, f"{exponent(self._log_ratio())}.exp()")
            elif name == "log_ratio":
                self._log_ratio()
            else:
                self._add(name, _SHARED[name])

    def log_of(self, policy: str) -> str:
        """Returns the name of log policy/behavior of each token, to be compared only. policy: proximal or current."""
        if policy == "proximal":
            return self._add("log_rho", _SHARED["log_rho"])
        return self._token() if self.over == "behavior" else self.define("log_w", "current - behavior")

    def ratio_of(self, policy: str, level: str) -> str:
        """Returns the name of policy/behavior at a level, to be compared only."""
        if policy == "current" and (level, "behavior") == (self.level, self.over):
            self.use("ratio")
            return "ratio"
        name = {"proximal": "rho", "current": "w"}[policy] + ("" if level == "token" else f"_{level}")
        return self.define(name, f"{exponent(self.at_level(self.log_of(policy), level))}.exp()")

    def at_level(self, name: str, level: str) -> str:
        """Returns a log-ratio at a level, from the name of the tokens' log-ratio."""
        if level == "token":
            return name
        if level in TURN_LEVELS:
            total = self.per_turn(name, name.removesuffix(".detach()"))
            return total if level == "turn" else f"{total} / {self.turn_length(name)}"
        total = f"{name}.cumsum(1)" if level in PER_TOKEN_LEVELS else f"{name}.sum(1, keepdim=True)"
        if not level.endswith("geometric"):
            return total
        count = "position" if level in PER_TOKEN_LEVELS else "length"
        self.use(count)
        return f"{total} / {count}"

    def per_turn(self, values: str, like: str) -> str:
        """Returns the sum over the turn of each token; like: a tensor with the number type of the values."""
        self.define("numbers, turn", "turn.unique(return_inverse=True)  # turns, numbered from 0")
        zeros = self.define("zeros", f"{like}.new_zeros(len(mask), len(numbers))")
        return f"{zeros}.scatter_add(1, turn, {values}).gather(1, turn)"

    def turn_length(self, like: str) -> str:
        """Returns the name of the number of trained tokens of the turn of each token."""
        like = like.removesuffix(".detach()")
        return self.define("turn_length", f"{self.per_turn(f'mask.to({like}.dtype)', like)}.clamp(min=1)")

    def _add(self, name: str, expression: str) -> str:
        if name not in self._defined:
            self._defined[name] = expression
            row = f"{name} = {expression}"
            code, _, comment = row.partition("  # ")
            self.rows += [f"# {comment}", code] if comment and len(row) > WIDTH else [row]
        return name

    def _token(self) -> str:
        difference = f"current - {self.over}"
        difference = f"torch.where(off_policy, 0.0, {difference})" if self.external else difference
        return self._add("log_ratio" if self.level == "token" else "token_log_ratio", difference)

    def _log_ratio(self) -> str:
        token = self._token()
        if self.level == "token":
            return token
        value = self.define(f"{self.level}_log_ratio", self.at_level(f"{token}.detach()", self.level))
        return self._add("log_ratio", f"{value} + ({token} - {token}.detach())  # gradient of each token")


def number(value: Number) -> str:
    """Returns a number as written in code."""
    text = f"{'-' if value < 0 else ''}torch.inf" if math.isinf(value) else f"{value:.15g}"
    return text.replace("e-0", "e-")


def exponent(log: str) -> str:
    """Returns an expression of a log-ratio, clamped so that its exponential is finite."""
    log = f"({log})" if re.search(r" [-+*/] ", log) else log
    return f"{log}.clamp({number(-LOG_RATIO_BOUND)}, {number(LOG_RATIO_BOUND)})"
