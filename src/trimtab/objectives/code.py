"""An objective as one function in plain PyTorch, which needs no other import: `Objective.code`.

What takes a pass over the whole update first is a second function: the limit of M2PO, the mean of normalized weights,
the number of tokens or responses that are kept.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trimtab.corrections.code_lines import ARGUMENTS, WIDTH, Lines, number
from trimtab.errors import TrimtabError
from trimtab.objectives.advantages import ADVANTAGE_KINDS
from trimtab.objectives.regularizers import centering_ceiling, centering_code
from trimtab.types import MIN_BEHAVIOR

if TYPE_CHECKING:
    from trimtab.objectives.objective import Objective

MEANING = {
    "current": "log pi of the sampled tokens, (batch, time), with gradient",
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
"""Of the arguments of a printed function."""

_SELECTED = {
    **{"current": "current", "proximal": "proximal.detach()", "behavior": "behavior.detach()"},
    **{"reference": "reference.detach()", "entropy": "entropy", "advantage": "advantage"},
}
"""Arguments that a function sets to 0 at padding first, and what it takes of them."""

ASCII = {
    **{"−": "-", "·": "*", "≤": "<=", "≥": ">=", "≠": "!=", "‖": "||", "²": "^2", "½": "1/2", "∞": "inf", "w̄": "mean"},
    **{"π": "pi", "μ": "mu", "ρ": "rho", "τ": "tau", "α": "alpha", "σ": "sigmoid", "Σ": "sum", "Π": "prod"},
    **{"\\": "/", '"""': "'''"},
}
"""How an equation is written in a docstring."""


def write(objective: Objective, command: str) -> str:
    """Returns the text of the loss function, after those of the whole update if it needs any.

    command: what prints it, for the comment at its head. Raises `TrimtabError` for a part whose class has no `code`.
    """
    _check_classes(objective)
    name = re.sub(r"\W+", "_", objective.name).strip("_").lower()
    lines, functions, given = _lines(objective), list[str](), dict[str, str]()
    for what, (returns, expression, own) in _of_update(objective).items():
        summary = f'"""{returns} of a whole update: all its micro-batches and ranks, concatenated."""'
        read = _arguments(own.rows, expression)
        rows = [summary, *_selection(objective, read), *own.rows, f"return {expression}"]
        functions.append(_function(f"{name}_{what}", read, rows))
        lines.rows.append(f"{what} = {name}_{what}({', '.join(read)}) if {what} is None else {what}")
        given[what] = f"by {name}_{what} of the whole update; by default, of this batch"
    result = _loss(objective, lines, given)
    read = _arguments(lines.rows, result)
    rows = [*_docstring(objective, read, given), *_selection(objective, read), _valid(read), *lines.rows]
    rows.append(f"return torch.where(valid, {result}, torch.nan)")
    functions.append(_function(f"{name}_loss", [*read, *(f"{key}=None" for key in given)], rows))
    titles = (objective.source or f"The objective {objective.name}.", f"Printed by: {command}")
    head = [row for title in titles for row in textwrap.wrap(title, 118, initial_indent="# ", subsequent_indent="# ")]
    return "\n".join([*head, "import torch", "", "", "\n\n\n".join(functions)]) + "\n"


def _check_classes(objective: Objective) -> None:
    """Raises `TrimtabError` for a part whose class computes something else than the class that defines its `code`."""
    parts = {"__call__": [objective.surrogate], "keep": objective.masks, "per_token": [objective.kl]}
    parts |= {"apply": [] if objective.weight is None else [objective.weight], "scale": [objective.aggregation]}
    for method, members in parts.items():
        for part in members:
            owner = next(kind for kind in type(part).__mro__ if {"code", method} & set(vars(kind)))
            if "code" not in vars(owner):
                raise TrimtabError(
                    f"objective {objective.name!r}: {owner.__name__} has no code to print: define its "
                    "code(lines) beside equation (docs/objectives.md)"
                )


def _lines(objective: Objective) -> Lines:
    return Lines(objective.ratio.level, objective.ratio.over, external="off_policy" in objective.needs)


def _of_update(objective: Objective) -> dict[str, tuple[str, str, Lines]]:
    """Returns what needs the whole update first, by its name: what it is, its expression, and the lines before that."""
    found: dict[str, tuple[str, str, Lines]] = {}
    weight, aggregation = objective.weight, objective.aggregation
    if objective.surrogate.collects:
        lines = _lines(objective)
        found["limit"] = ("Returns the limit on |log ratio|", objective.surrogate.limit_code(lines), lines)
    if weight is not None and weight.normalize:
        lines = _lines(objective)
        lines.define("weight", weight.code(lines))
        found["mean_weight"] = ("Returns the mean weight", weight.mean_code(lines, "weight"), lines)
    if aggregation.denominator == "kept":
        lines = _lines(objective)
        if weight is not None and weight.rejects:
            lines.define("weight", weight.code(lines))
        count = aggregation.count_code(_keep(objective, lines))
        found["kept"] = (f"Returns the number of {aggregation.counted} that are kept", count, lines)
    return found


def _keep(objective: Objective, lines: Lines) -> str:
    """Defines which tokens are kept, with those that the weight rejects if they do not count; returns the name."""
    conditions = [rule.code(lines) for rule in objective.masks]
    if objective.aggregation.denominator == "kept" and objective.weight is not None and objective.weight.rejects:
        conditions.append("(weight > 0)")
    return lines.define("keep", " & ".join(["mask", *conditions])) if conditions else "mask"


def _loss(objective: Objective, lines: Lines, given: dict[str, str]) -> str:
    """Adds the loss of each token and the denominators, which are arguments, and returns the loss of the batch."""
    weight, aggregation = objective.weight, objective.aggregation
    surrogate = lines.define("surrogate", objective.surrogate.code(lines))
    factor = f"-{surrogate}"
    if weight is not None:
        name = lines.define("weight", weight.code(lines))
        factor = f"-{name}{' / mean_weight' if weight.normalize else ''} * {surrogate}"
    keep = _keep(objective, lines)
    terms = [f"torch.where({keep}, {factor}, 0.0)"]
    regularizers = _regularizers(objective, lines)
    results = []
    if "kept" in given:
        results.append(aggregation.code(lines, lines.define("losses", terms.pop()), "kept", keep))
    if terms or regularizers:
        counted = aggregation.counted
        which = f"{counted} with a trained token" if aggregation.kind == "trained-mean-token-sum" else counted
        given[counted] = (
            f"{'trained ' if counted == 'tokens' else ''}{which} of the whole update (per rank, where ranks average "
            "gradients); by default, of this batch"
        )
        text = " + ".join([*terms, *regularizers]).replace("+ -", "- ")
        values = lines.define("losses" if terms else "regularizers", text)
        lines.rows.append(f"{counted} = {aggregation.count_code()} if {counted} is None else {counted}")
        results.append(aggregation.code(lines, values, counted))
    return " + ".join(results)


def _regularizers(objective: Objective, lines: Lines) -> list[str]:
    """Returns the terms of the loss that no rule rejects."""
    terms = []
    if objective.kl.coef > 0:
        terms.append(f"{number(objective.kl.coef)} * {objective.kl.code(lines)}")
    if objective.centering:
        ceiling = centering_ceiling(objective.ratio, objective.surrogate, corrected=False)
        terms.append(f"advantage * {centering_code(ceiling, lines)}")
    return [*terms, *([f"-{number(objective.entropy_coef)} * entropy"] if objective.entropy_coef > 0 else [])]


def _arguments(rows: Sequence[str], result: str) -> list[str]:
    """Returns the arguments that code reads; every function needs the mask."""
    text = "\n".join([*(row.partition("  # ")[0] for row in rows), result])
    return [name for name in ARGUMENTS if name == "mask" or re.search(rf"\b{name}\b", text)]


def _selection(objective: Objective, read: Sequence[str]) -> Iterator[str]:
    """Yields the lines that set every argument to 0 at padding."""
    yield "zero = torch.zeros(1, device=mask.device)  # float32, which bfloat16 becomes; float64 stays"
    external = "off_policy" in objective.needs
    for name in (name for name in read if name in _SELECTED):
        where = "mask & ~off_policy" if external and name in ("proximal", "behavior") else "mask"
        yield f"{name} = torch.where({where}, {_SELECTED[name]}, zero)"


def _valid(read: Sequence[str]) -> str:
    policies = [name for name in ("current", "proximal", "behavior", "reference") if name in read]
    finite = f"({' + '.join(policies)})" if len(policies) > 1 else policies[0]
    sampled = f" & (behavior >= {number(MIN_BEHAVIOR)}).all()" if "behavior" in read else ""
    return f"valid = {finite}.isfinite().all(){sampled}  # else the loss is NaN"


def _docstring(objective: Objective, read: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Returns the docstring: the equation with its numbers, and the arguments."""
    text = objective.equation()
    for symbol, word in ASCII.items():
        text = text.replace(symbol, word)
    equation = [line.strip() for line in text.splitlines() if not line.startswith("  A: ")]
    about = {name: MEANING[name] for name in read} | dict(given)
    about["advantage"] += f", {ADVANTAGE_KINDS[objective.advantage]} ({objective.advantage})"
    rows = [*equation[1:], "", *(f"{name}: {what}" for name, what in about.items())]
    wrapped = [part for row in rows for part in textwrap.wrap(row, WIDTH, subsequent_indent="    ") or [""]]
    first, *more = textwrap.wrap(equation[0], WIDTH - 3)
    return [f'"""{first}', *more, *wrapped, '"""']


def _function(name: str, arguments: Sequence[str], rows: Sequence[str]) -> str:
    signature = textwrap.wrap(f"def {name}({', '.join(arguments)}):", 120, subsequent_indent=" " * 8)
    return "\n".join([*signature, *(f"    {row}" if row else "" for row in rows)])
