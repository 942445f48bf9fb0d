"""The lines of a loss function in plain PyTorch, to which every part adds its own (`Objective.code`).

A part has `code(lines)` beside its `equation()`, which returns an expression. Names in it are the arguments of the
printed function, `current`, `behavior`, `advantage`, ..., (batch, time) and 0 at padding; what it defined in `lines`;
and what all parts share, which is defined where it is used first: `length` and `position` (of trained tokens in the
response), `ratio` and `log_ratio` of the objective, `log_rho` = log proximal/behavior, `log_w` = log current/behavior.
"""

from __future__ import annotations

import math
import re

from trimtab.corrections.ratios import LOG_RATIO_BOUND, PER_TOKEN_LEVELS, TURN_LEVELS, Number

WIDTH = 116
"""Of a line in a function of 120 columns."""

TAKEN = ("current", "proximal", "behavior", "mask", "advantage", "valid", "tokens", "responses", "kept")
"""Names that the function gives itself, so that no part can."""


class Lines:
    """The body of a function: assignments, each name once.

    level, over: those of the objective's ratio. external: whether `off_policy` tokens have no proximal and behavior
    policy. rows: the lines.
    """

    def __init__(self, level: str, over: str, *, external: bool = False) -> None:
        self.level, self.over, self.external = level, over, external
        self.rows: list[str] = []
        self._defined: dict[str, str] = dict.fromkeys(TAKEN, "")
        self._token = "log_ratio" if level == "token" else "token_log_ratio"
        whole = f"{level}_log_ratio + (token_log_ratio - token_log_ratio.detach())  # with each token's own gradient"
        self._shared = {
            "length": "mask.sum(1, keepdim=True).clamp(min=1)",
            "position": "mask.cumsum(1).clamp(min=1)  # 1 at the first trained token",
            "log_rho": "proximal - behavior",
            "log_w": "current - behavior",
            "log_ratio": whole,
            self._token: f"torch.where(off_policy, 0.0, current - {over})" if external else f"current - {over}",
            "ratio": exponential("log_ratio"),
        }

    def define(self, name: str, expression: str) -> str:
        """Adds `name = expression`, which may end in a comment, and returns the name, numbered where it is taken."""
        free, number = name, 1
        while free in self._shared or self._defined.get(free, expression) != expression:
            number += 1
            free = f"{name}_{number}"
        return self._add(free, expression)

    def add(self, row: str) -> None:
        """Adds a line that gives no value to a new name."""
        self.rows.append(self._use(row))

    def log_of(self, policy: str) -> str:
        """Returns the name of log policy/behavior of each token. policy: proximal or current."""
        return "log_rho" if policy == "proximal" else self._token if self.over == "behavior" else "log_w"

    def ratio_of(self, policy: str, level: str) -> str:
        """Returns the name of policy/behavior at a level."""
        if policy == "current" and (level, "behavior") == (self.level, self.over):
            return "ratio"
        name = {"proximal": "rho", "current": "w"}[policy] + ("" if level == "token" else f"_{level}")
        return self.define(name, exponential(self.at_level(self.log_of(policy), level)))

    def at_level(self, name: str, level: str) -> str:
        """Returns a log-ratio at a level, from the name of the tokens' log-ratio."""
        if level in TURN_LEVELS:
            self.define("numbers, turn", "turn.unique(return_inverse=True)  # turns, numbered from 0")
            if "zeros" not in self._defined:
                self.define("zeros", f"torch.zeros(len(mask), len(numbers)).to({name.partition('.')[0]})")
            total = f"zeros.scatter_add(1, turn, {name}).gather(1, turn)"
            return total if level == "turn" else f"{total} / {self.turn_length()}"
        place = "position" if level in PER_TOKEN_LEVELS else "length"
        total = {"token": name, "position": f"{name}.cumsum(1)"}.get(place, f"{name}.sum(1, keepdim=True)")
        return name if level == "token" else f"{total} / {place}" if level.endswith("geometric") else total

    def turn_length(self) -> str:
        """Returns the name of the number of trained tokens in each token's turn, after a log-ratio of turns."""
        return self.define("turn_length", "zeros.scatter_add(1, turn, mask.to(zeros)).gather(1, turn).clamp(min=1)")

    def _use(self, expression: str) -> str:
        """Defines what an expression shares with others, and returns it."""
        for name in dict.fromkeys(re.findall(r"\w+", expression.partition("  # ")[0])):
            if name in self._shared:
                self._add(name, self._shared[name])
            elif name == f"{self.level}_log_ratio" and name not in self._defined:
                self._add(name, self.at_level("token_log_ratio.detach()", self.level))
        return expression

    def _add(self, name: str, expression: str) -> str:
        if name not in self._defined:
            self._defined[name] = expression
            row = f"{name} = {self._use(expression)}"
            code, _, comment = row.partition("  # ")
            self.rows += [f"# {comment}", code] if comment and len(row) > WIDTH else [row]
        return name


def number(value: Number) -> str:
    """Returns a number as written in code."""
    text = f"{'-' if value < 0 else ''}torch.inf" if math.isinf(value) else f"{value:.15g}"
    return text.replace("e-0", "e-")


def clamped(log: str) -> str:
    """Returns an expression of a log-ratio, clamped so that its exponential is finite."""
    log = f"({log})" if re.search(r" [-+*/] ", log) else log
    return f"{log}.clamp({number(-LOG_RATIO_BOUND)}, {number(LOG_RATIO_BOUND)})"


def exponential(log: str) -> str:
    """Returns the exponential of a log-ratio, which is finite."""
    return f"{clamped(log)}.exp()"
