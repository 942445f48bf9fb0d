"""An objective as one function in plain PyTorch, which needs no other import: `Objective.code`; and the noise of ALP.

What takes a pass over the whole update first is a second function: the limit of M2PO, the mean of normalized weights,
the number of tokens or responses that are kept.

The trainer has its own noise (`trainer/models/perturbation.py`), with a float32 residual stream and packed rows.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trimtab.corrections.code_lines import WIDTH, Lines, number
from trimtab.errors import TrimtabError
from trimtab.objectives.advantages import ADVANTAGE_KINDS
from trimtab.types import MIN_BEHAVIOR

if TYPE_CHECKING:
    from trimtab.objectives.objective import Objective


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
"""What each is, in the order in which functions take them."""
POLICIES = ("current", "proximal", "behavior", "reference")
"""Arguments that are log-probs; the first alone has a gradient."""

OF_UPDATE = {
    "limit": "the limit c on |log ratio|",
    "mean_weight": "the mean weight",
    "kept": "the denominator without what is rejected",
}
"""What the functions of a whole update return, by the argument of the loss that takes it."""

PER_RANK = " (per rank, where ranks average gradients); by default, of this batch"

ASCII = {
    **{"σ_": "sigma_", "ε": "eps"},
    **{"−": "-", "·": "*", "≤": "<=", "≥": ">=", "≠": "!=", "‖": "||", "²": "^2", "½": "1/2", "∞": "inf", "w̄": "mean"},
    **{"π": "pi", "μ": "mu", "ρ": "rho", "τ": "tau", "α": "alpha", "σ": "sigmoid", "Σ": "sum", "Π": "prod"},
    **{"\\": "/", '"""': "'''"},
}
"""How an equation is written in a docstring."""


def write(objective: Objective, command: str) -> str:
    """Returns the text of the loss function, after those of the whole update if it needs any.

    command: what prints it, for the comment at its head. Raises `TrimtabError` for a part whose class has no `code` of
    its own: it may compute something else than the class that it inherits from.
    """
    parts = (objective.surrogate, *objective.masks, objective.aggregation, objective.weight, objective.kl)
    for part in filter(None, parts):
        if "code" not in vars(type(part)):
            raise TrimtabError(
                f"objective {objective.name!r}: {type(part).__name__} has no code to print: define its code(lines) "
                "beside equation (docs/reference-objectives.md)"
            )
    name = re.sub(r"\W+|^(?=\d)", "_", objective.name).rstrip("_").lower()
    functions, given = list[str](), dict[str, str]()
    loss = _lines(objective)
    for what, lines in _of_update(objective).items():
        about = f'"""Returns {OF_UPDATE[what]} of a whole update: all its micro-batches and ranks, concatenated."""'
        read = _arguments(lines)
        functions.append(_function(f"{name}_{what}", read, [about, *_selection(objective, read), *lines.rows]))
        loss.rows.append(f"{what} = {name}_{what}({', '.join(read)}) if {what} is None else {what}")
        given[what] = f"{OF_UPDATE[what]}, of the whole update by {name}_{what}"
        given[what] += PER_RANK if what == "kept" else "; by default, of this batch"
    given |= _loss(objective, loss)
    read = _arguments(loss)
    rows = [*_docstring(objective, read, given), *_selection(objective, read), _valid(read), *loss.rows]
    functions.append(_function(f"{name}_loss", [*read, *(f"{key}=None" for key in given)], rows))
    titles = (
        f"{objective.name}: {objective.source or 'an objective of own parts'}",
        f"Printed by Trimtab (Apache-2.0): {command}",
    )
    head = [row for title in titles for row in textwrap.wrap(title, 118, initial_indent="# ", subsequent_indent="# ")]
    return "\n".join([*head, "import torch", "", "", "\n\n\n".join(functions)]) + "\n"


def _lines(objective: Objective) -> Lines:
    return Lines(objective.ratio.level, objective.ratio.over, external="off_policy" in objective.needs)


def _of_update(objective: Objective) -> dict[str, Lines]:
    """Returns the lines of the functions of the whole update, by what each returns."""
    found: dict[str, Lines] = {}
    if objective.surrogate.collects:
        lines = found["limit"] = _lines(objective)
        lines.add(f"return {objective.surrogate.limit_code(lines)}")
    if objective.weight is not None and objective.weight.normalize:
        lines = found["mean_weight"] = _lines(objective)
        lines.add(f"return {objective.weight.mean_code(lines)}")
    if objective.aggregation.denominator == "kept":
        lines = found["kept"] = _lines(objective)
        lines.add(f"return {objective.aggregation.code('', '', _keep(objective, lines))[1]}")
    return found


def _keep(objective: Objective, lines: Lines) -> str:
    """Defines which tokens are kept, with those that the weight rejects if they do not count; returns the name."""
    conditions, weight = [rule.code(lines) for rule in objective.masks], objective.weight
    if objective.aggregation.denominator == "kept" and weight is not None and weight.rejects:
        conditions.append(f"({lines.define('weight', weight.code(lines))} > 0)")
    if not conditions:
        return "mask"
    keep = lines.define("keep", f"mask & {conditions[0]}")
    for condition in conditions[1:]:
        lines.add(f"{keep} = {keep} & {condition}")
    return keep


def _loss(objective: Objective, lines: Lines) -> dict[str, str]:
    """Adds the lines of the loss; returns what its denominator is, by the name of the argument."""
    weight, aggregation = objective.weight, objective.aggregation
    factor = lines.define("surrogate", objective.surrogate.code(lines))
    if weight is not None:
        mean = " / mean_weight" if weight.normalize else ""
        factor = f"{lines.define('weight', weight.code(lines))}{mean} * {factor}"
    keep = _keep(objective, lines)
    policy, regularizers = [f"torch.where({keep}, -{factor}, 0.0)"], _regularizers(objective, lines)
    count = "tokens" if aggregation.kind == "token-mean" else "responses"
    sums, given = list[str](), dict[str, str]()
    if aggregation.denominator == "kept":
        sums.append(aggregation.code(lines.define("losses", policy.pop()), "kept", keep)[0])
    if terms := policy + regularizers:
        values = lines.define("losses" if policy else "regularizers", " + ".join(terms).replace("+ -", "- "))
        summed, default = aggregation.code(values, count)
        sums.append(summed)
        lines.rows.append(f"{count} = {default} if {count} is None else {count}")
        trained = " with a trained token" if aggregation.kind == "trained-mean-token-sum" else ""
        given[count] = (
            f"{'trained tokens' if count == 'tokens' else f'responses{trained}'} of the whole update{PER_RANK}"
        )
    lines.add(f"return torch.where(valid, {' + '.join(sums)}, torch.nan)")
    return given


def _regularizers(objective: Objective, lines: Lines) -> list[str]:
    """Returns the terms of the loss that no rule rejects."""
    terms = []
    if objective.kl.coef > 0:
        terms.append(f"{number(objective.kl.coef)} * {objective.kl.code(lines)}")
    if objective.center is not None:
        terms.append(f"advantage * {objective.center.code(lines)}")
    return [*terms, *([f"{number(-objective.entropy_coef)} * entropy"] if objective.entropy_coef > 0 else [])]


def _arguments(lines: Lines) -> list[str]:
    """Returns the arguments that lines read; every function needs the mask."""
    text = "\n".join(row.partition("# ")[0] for row in lines.rows)
    return [name for name in ARGUMENTS if name == "mask" or re.search(rf"\b{name}\b", text)]


def _selection(objective: Objective, read: Sequence[str]) -> list[str]:
    """Returns the lines that set numbers to 0 at padding."""
    rows = ["zero = torch.zeros(1, device=mask.device)  # float32, which bfloat16 becomes; float64 stays"]
    for name in (name for name in read if name in (*POLICIES, "entropy", "advantage")):
        where = "mask & ~off_policy" if name in ("proximal", "behavior") and "off_policy" in objective.needs else "mask"
        rows.append(f"{name} = torch.where({where}, {name}{'.detach()' if name in POLICIES[1:] else ''}, zero)")
    return rows


def _valid(read: Sequence[str]) -> str:
    finite = " + ".join(name for name in POLICIES if name in read)
    sampled = f" & (behavior >= {number(MIN_BEHAVIOR)}).all()" if "behavior" in read else ""
    finite = f"({finite})" if " " in finite else finite
    return f"valid = {finite}.isfinite().all(){sampled}  # else NaN"


def _docstring(objective: Objective, read: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Returns the docstring: the equation with its numbers, and the arguments."""
    text = objective.equation()
    for symbol, word in ASCII.items():
        text = text.replace(symbol, word)
    equation = [line.strip() for line in text.splitlines() if not line.startswith("  A: ")]
    about = {name: ARGUMENTS[name] for name in read} | dict(given)
    about["advantage"] += f", {ADVANTAGE_KINDS[objective.advantage]} ({objective.advantage})"
    rows = [f'"""{equation[0]}', *equation[1:], "", *(f"{name}: {what}" for name, what in about.items()), '"""']
    return [part for row in rows for part in textwrap.wrap(row, WIDTH, subsequent_indent="    ") or [""]]


def _function(name: str, arguments: Sequence[str], rows: Sequence[str]) -> str:
    signature = textwrap.wrap(f"def {name}({', '.join(arguments)}):", 120, subsequent_indent=" " * 8)
    return "\n".join([*signature, *(f"    {row}" if row else "" for row in rows)])


def perturb(layers: torch.nn.ModuleList, log_sigma: torch.Tensor, seed: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Adds sigma_l * eps_l to the input of every decoder layer l, eps_l ~ N(0, I), until the handles are removed.

    Only for the forward whose log-probs are `current`, and its backward: all other forwards have no noise.
    log_sigma: (layers,) a parameter, log 1e-4 at first, with a learning rate of its own (5e-4), without decay, and left
        out of the gradient clip.
    seed: another one for each update and micro-batch; activations that are recomputed get the same noise.
    Not printed: a float32 residual stream, without which bfloat16 rounds most of the noise away.
    """
    handles = []
    for index, layer in enumerate(layers):

        def add(_layer, inputs, index=index):
            hidden = inputs[0]
            generator = torch.Generator(hidden.device).manual_seed(seed * len(layers) + index)
            noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=hidden.dtype)
            return (hidden + log_sigma[index].exp() * noise, *inputs[1:])

        handles.append(layer.register_forward_pre_hook(add))
    return handles
