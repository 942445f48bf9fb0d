"""A loss as functions in plain PyTorch that need no other import (`Objective.code`). Every part adds its own lines.

Each part has `code(lines)` beside `equation()`: it returns an expression. The expression may read the arguments of the
printed function (`current`, `behavior`, `advantage`, ...), which are (batch, time) and 0 at padding, and the names that
the part added to `lines`. All parts share `length` and `position` (of trained tokens in the response), `ratio` and
`log_ratio` of the objective, `log_rho` = log proximal/behavior, and `log_w` = log current/behavior. A printed function
has only the lines that its result needs, in order of dependence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from trimtab.corrections.ratios import LOG_RATIO_BOUND, PREFIX_LEVELS, TURN_LEVELS
from trimtab.types import MIN_BEHAVIOR

ARGUMENTS = {
    "current": "log pi of the sampled tokens, (batch, time), a response in each row, with gradient",
    "proximal": "log pi_old, by the trainer with the weights before the update",
    "behavior": "log mu, as the sampler reported it",
    "reference": "log pi_ref, of the reference policy",
    "entropy": "of the current policy at each token, with gradient",
    "off_policy": "bool, True at tokens of external traces, whose proximal and behavior are not read",
    "turn": "int, number of the model turn of each token",
    "age": "int, of the policy that sampled each token, in training steps: 1 for the newest",
    "head_current": "log pi of the sampler's most probable ids, (batch, time, ids), with gradient",
    "head_behavior": "log mu of these ids",
    "mask": "bool, True at trained tokens; the others may hold any value, NaN included",
    "advantage": "(batch, 1) or (batch, time)",
}
"""The meaning of each argument, in the order in which functions take them."""
POLICIES = ("current", "proximal", "behavior", "reference")
COUNTS = ("tokens", "responses")
RESERVED = (*ARGUMENTS, *COUNTS, "kept", "weight", "surrogate", "keep", "losses", "regularizers", "valid")
"""Names that parts cannot define."""

ASCII = {
    **{"σ_": "sigma_", "ε": "eps"},
    **{"−": "-", "·": "*", "≤": "<=", "≥": ">=", "≠": "!=", "‖": "||", "²": "^2", "½": "1/2", "∞": "inf", "w̄": "mean"},
    **{"π": "pi", "μ": "mu", "ρ": "rho", "τ": "tau", "α": "alpha", "σ": "sigmoid", "Σ": "sum", "Π": "prod"},
    **{"\\": "/", '"""': "'''"},
}
"""ASCII replacements for the symbols of an equation in a printed docstring."""

WIDTH = 116
"""Columns of a line in a function body: 120 without the indentation."""

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_NUMBER = re.compile(r"(?<![\w.])(\d+(\.\d+)?(e[-+]?\d+)?|inf)\b")


class Lines:
    """The lines of a printed function, by name: each is an expression, which may end in a comment.

    level, over: fields of the objective's ratio. of_update: statistics of the whole update, with a description by name.
    """

    def __init__(self, level: str, over: str) -> None:
        self.level, self.over = level, over
        self.token = "log_ratio" if level == "token" else "token_log_ratio"
        self.of_update: dict[str, str] = {}
        head = "torch.where(mask[..., None], {}, -inf).to(current.dtype)"
        own = "(token_log_ratio - token_log_ratio.detach())  # with each token's own gradient"
        self.values = {
            **dict.fromkeys(RESERVED, ""),
            "zero": "torch.zeros(1, device=mask.device)  # float32, which bfloat16 becomes; float64 stays",
            **{name: f"torch.where(mask, {name}, zero)" for name in ("current", "entropy", "advantage")},
            **{name: f"torch.where(mask, {name}.detach(), zero)" for name in POLICIES[1:]},
            "head_current": head.format("head_current"),
            "head_behavior": head.format("head_behavior.detach()"),
            "length": "mask.sum(1, keepdim=True).clamp(min=1)",
            "position": "mask.cumsum(1).clamp(min=1)  # 1 at the first trained token",
            "numbers": "turn.unique()",
            "turn": "torch.searchsorted(numbers, turn)  # numbered from 0",
            "turn_length": "zeros.scatter_add(1, turn, mask.to(zeros)).gather(1, turn).clamp(min=1)",
            "log_rho": "proximal - behavior",
            "log_w": "current - behavior",
            "log_ratio": f"{level}_log_ratio + {own}",
            self.token: f"current - {over}",
            "ratio": f"{clamped('log_ratio')}.exp()",
        }
        if level != "token":
            self.values[f"{level}_log_ratio"] = self.at_level("token_log_ratio.detach()", level)

    def define(self, name: str, expression: str) -> str:
        """Adds the line `name = expression`, and returns the name, with a number if the name is taken."""
        free, number = name, 1
        while self.values.get(free, expression) != expression:
            number += 1
            free = f"{name}_{number}"
        self.values[free] = expression
        return free

    def write(self, text: str) -> str:
        """Adds the lines `name = expression` by `define`, and returns the last line, an expression of these names."""
        while "\n" in (text := text.strip()):
            row, _, text = text.partition("\n")
            name, _, expression = row.partition(" = ")
            text = re.sub(rf"(?<![\w.]){name}\b", self.define(name, expression), text)
        return text

    def log_of(self, policy: str) -> str:
        """Returns the name of log policy/behavior of each token. policy: proximal or current."""
        return "log_rho" if policy == "proximal" else self.token if self.over == "behavior" else "log_w"

    def ratio_of(self, policy: str, level: str) -> str:
        """Returns the name of policy/behavior at a level."""
        if (policy, "behavior", level) == ("current", self.over, self.level):
            return "ratio"
        name = {"proximal": "rho", "current": "w"}[policy] + ("" if level == "token" else f"_{level}")
        return self.define(name, f"{clamped(self.at_level(self.log_of(policy), level))}.exp()")

    def at_level(self, log: str, level: str) -> str:
        """Returns an expression of the log-ratio at a level. log: the name of the per-token log-ratio."""
        total, length = f"{log}.sum(1, keepdim=True)", "length"
        if level in TURN_LEVELS:
            self.values.setdefault("zeros", f"torch.zeros(len(mask), len(numbers)).to({log.partition('.')[0]})")
            total, length = f"zeros.scatter_add(1, turn, {log}).gather(1, turn)", "turn_length"
        elif level in PREFIX_LEVELS:
            total, length = f"{log}.cumsum(1)", "position"
        return log if level == "token" else f"{total} / {length}" if level.endswith("geometric") else total

    def read_by(self, expression: str, seen: set[str]) -> Iterator[str]:
        """Yields the names that an expression needs and that are not in `seen`, in order of dependence."""
        for name in _NAME.findall(expression.partition("  # ")[0]):
            if name in self.values and name not in seen:
                seen.add(name)
                yield from self.read_by(self.values[name], seen)
                yield name

    def function(self, result: str) -> tuple[list[str], list[str]]:
        """Returns the arguments and the lines of a function that returns the expression `result`."""
        read, rows = set(self.read_by(result, set())), list[str]()
        arguments = [name for name in ARGUMENTS if name in read]
        for name in self.read_by(" ".join([*arguments, result]), set()):
            row = _NUMBER.sub(_as_written, f"{name} = {self.values[name]}" if self.values[name] else "")
            code, _, comment = row.partition("  # ")
            rows += [f"# {comment}", code] if comment and len(row) > WIDTH else row.splitlines()
        return arguments, [*rows, _NUMBER.sub(_as_written, f"return {result}")]


def clamped(log: str) -> str:
    """Returns an expression of a log-ratio, clamped so that its exponential is finite."""
    log = f"({log})" if re.search(r" [-+*/] ", log) else log
    return f"{log}.clamp({-LOG_RATIO_BOUND}, {LOG_RATIO_BOUND})"


def _as_written(found: re.Match[str]) -> str:
    """Returns a number as written in code: 2 for 2.0."""
    value = float(found[0])
    return "torch.inf" if math.isinf(value) else f"{value:.15g}" if value else found[0]


def write(lines: Lines, loss: str, name: str, titles: Sequence[str], equation: Sequence[str], advantage: str) -> str:
    """Returns the code of a loss function, after functions of whole-update statistics if the loss needs any.

    loss: an expression in the names of `lines`. titles: comments at the head. advantage: the kind, in words.
    """
    name = re.sub(r"\W+|^(?=\d)", "_", name).rstrip("_").lower()
    functions, optional = list[str](), dict[str, str]()
    for what, words in lines.of_update.items():
        source = " of the whole update"
        if what not in COUNTS:
            arguments, rows = lines.function(lines.values[what])
            doc = f'"""Returns {words} of a whole update, all micro-batches and ranks concatenated."""'
            functions.append(_function(f"{name}_{what}", arguments, [doc, *rows]))
            lines.values[what] = f"{name}_{what}({', '.join(arguments)})"
            source = f", of the whole update by {name}_{what}"
        lines.values[what] += f" if {what} is None else {what}"
        ranks = " (per rank, where ranks average gradients)" if what in (*COUNTS, "kept") else ""
        optional[what] = f"{words}{source}{ranks}; by default, of this batch"

    read = set(lines.read_by(loss, set()))
    finite = " + ".join(policy for policy in POLICIES if policy in read)
    finite = f"({finite})" if " " in finite else finite
    floor = f"((behavior >= {MIN_BEHAVIOR}) | off_policy)" if "off_policy" in read else f"(behavior >= {MIN_BEHAVIOR})"
    lines.values["valid"] = f"{finite}.isfinite().all(){f' & {floor}.all()' if 'behavior' in read else ''}  # else NaN"
    arguments, rows = lines.function(f"torch.where(valid, {loss}, torch.nan)")

    about = {argument: ARGUMENTS[argument] for argument in arguments} | optional
    about["advantage"] += f", {advantage}"
    text = "\n".join([*equation, "", *(f"{argument}: {words}" for argument, words in about.items())])
    for symbol, word in ASCII.items():
        text = text.replace(symbol, word)
    paragraphs = (wrap(row, WIDTH, subsequent_indent="    ") or [""] for row in f'"""{text}\n"""'.splitlines())
    signature = [*arguments, *(f"{what}=None" for what in optional)]
    functions.append(_function(f"{name}_loss", signature, [*(row for rows in paragraphs for row in rows), *rows]))
    head = [row for title in titles for row in wrap(title, 118, initial_indent="# ", subsequent_indent="# ")]
    return "\n".join([*head, "import torch", "", "", "\n\n\n".join(functions)]) + "\n"


def _function(name: str, arguments: Sequence[str], rows: Sequence[str]) -> str:
    signature = wrap(f"def {name}({', '.join(arguments)}):", 120, subsequent_indent=" " * 8)
    return "\n".join([*signature, *(f"    {row}" if row else "" for row in rows)])
