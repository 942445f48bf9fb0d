"""How often `trimtab check-loss` is right: slips, presets without a name, public reports, and losses of TRL and verl.

    python benchmarks/check_loss.py slips others more readers blind last names reports
    python benchmarks/check_loss.py peers        # with TRL and verl installed: the table of docs/results/losses.md

slips, others, more, readers, blind, last
         planted in the printed code of every preset and of variants of it: is the slip the first difference that is
         named? loss_slips.toml says when each set was written. With `slips`, the printed code itself must be called
         equal.
names    presets with bounds drawn at random, without a name: is it among those called equal, with which bounds?
reports  losses of public reports, rebuilt in a few lines.
peers    the losses that TRL and verl ship, in our terms.
"""

from __future__ import annotations

import inspect
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import trimtab
from loss_slips import REPORTS, SETS, VARIANTS
from shared import options_of
from trimtab.check_loss.check import check
from trimtab.check_loss.probes import Batch, Loss, Update, of_objective
from trimtab.check_loss.signatures import of_function
from trimtab.objectives import Objective
from trimtab.objectives.presets import PRESETS, get_preset

PAGE = Path(__file__).parents[1] / "docs" / "results" / "losses.md"


def printed(text: str) -> Loss:
    """Returns printed code as a loss. A second function, if there is one, takes the whole update first."""
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102  what Trimtab prints
    *firsts, loss = (value for value in names.values() if inspect.isfunction(value))
    if not firsts:
        return of_function(loss, {"trained_responses": "responses"} if "responses with a trained" in text else {})
    taken = inspect.signature(loss).parameters

    def call(batch: Batch, update: Update) -> torch.Tensor:
        whole = {
            next(name for name in taken if first.__name__.endswith(f"_{name}")): first(
                *(update.batch[name].detach() for name in inspect.signature(first).parameters)
            )
            for first in firsts
        }
        given = {**batch, "tokens": update.tokens, "responses": update.responses, **whole}
        return loss(**{name: given[name] for name in taken if name in given})

    return Loss(loss.__name__, call)


def variants(name: str) -> Iterator[tuple[str, Objective]]:
    """The preset, and its variants that exist."""
    preset = get_preset(name)
    for variant, keywords in VARIANTS.items():
        try:
            found = preset.with_keywords(keywords)
        except ValueError:
            continue
        if found != preset.objective or not variant:
            yield variant, found


def slips(group: str) -> None:
    counts = {slip: [0, 0] for slip in SETS[group]}
    missed, right, checks, began = [], [0, 0], 0, time.perf_counter()
    for name in PRESETS:
        for variant, objective in variants(name):
            text = objective.code()
            if group == "slips":
                found = check(printed(text), objective, spec=name).differences
                right = [right[0] + (not found), right[1] + 1]
                missed += [(name, variant, "the right loss", found[:2])] if found else []
            own_dual = variant == "" and getattr(objective.surrogate, "dual", None) is not None
            for slip, (plant, kinds, needs) in SETS[group].items():
                if variant not in needs and not ("own" in needs and own_dual):
                    continue
                wrong = plant(text)
                if wrong is None:
                    continue
                found = check(printed(wrong), objective, spec=name).differences
                checks += 1
                good = bool(found) and found[0].kind in kinds
                counts[slip] = [counts[slip][0] + good, counts[slip][1] + 1]
                missed += [] if good else [(name, variant, slip, found[:2])]
    if group == "slips":
        print(f"right losses called equal: {right[0]} of {right[1]}")
    for slip, (good, of) in counts.items():
        print(f"  {slip:32} {good:3} of {of:3}")
    good, of = (sum(one[k] for one in counts.values()) for k in (0, 1))
    print(
        f"the slip is the first difference: {good} of {of} = {good / of:.1%}; "
        f"{(time.perf_counter() - began) / checks:.2f} s a check"
    )
    for one in missed:
        print("  missed:", *one)


RANGES: dict[str, tuple[float, float]] = {
    **{"clip_low": (0.05, 0.5), "clip_high": (0.05, 0.6), "clip_dual": (2, 8), "weight_max": (1.2, 6)},
    **{"weight_min": (0.2, 0.9), "ceiling": (1.2, 8), "keep_min": (0.95, 0.995), "keep_max": (1.005, 1.08)},
    **{"divergence_max": (0.02, 0.2), "delta": (0.02, 0.2), "tau_positive": (0.5, 2), "tau_negative": (0.5, 2)},
    **{"epsilon": (0.05, 0.5), "k1_positive": (1, 3), "k1_negative": (1, 3), "k2_positive": (1, 3)},
    **{"k2_negative": (1, 3), "beta": (1e-3, 1e-1), "k3_max": (5e-4, 5e-3), "kl_coef": (0.001, 0.1)},
}
OF_RESPONSES = {"clip_low": (0.3, 0.8), "clip_high": (1.0, 4.0), "clip_dual": (6.0, 12.0)}
SPECIAL: dict[str, dict[str, tuple[float, float]]] = {
    "gspo": dict.fromkeys(("clip_low", "clip_high"), (1.5e-3, 5e-2)),
    "ctpo": {"clip_low": (0.01, 0.1), "clip_high": (0.01, 0.1), "clip_dual": (0.11, 0.3)},
    **dict.fromkeys(("seq-bypass", "seq-alp", "seq-mis-seq-ratio"), OF_RESPONSES),
    "flash-reinforce": {"divergence_max": (2e-3, 2e-2)},
    "k3-mask": {"divergence_max": (2e-3, 5e-2)},
}


def names(seed: int = 0) -> None:
    """Only bounds are drawn that a keyword of the preset has and that are not unset."""
    generator, named, close, began = random.Random(seed), 0, 0, time.perf_counter()
    for name, preset in PRESETS.items():
        ranges = RANGES | SPECIAL.get(name, {})
        drawn = {
            key: round(generator.uniform(*ranges[key]), 4)
            for key, value in preset.defaults.items()
            if key in ranges and value is not None
        }
        answer = check(of_objective(get_preset(name).with_keywords(drawn)))
        equal = [dict(one.settings) for one in answer.nearest if not one.differences]
        mine = [settings for settings in equal if settings["name"] == name][:1]
        errors = [abs(one.get(key, preset.defaults[key]) / value - 1) for one in mine for key, value in drawn.items()]
        good = bool(mine) and max(errors, default=0) <= 1e-3
        named, close = named + bool(mine), close + good
        if not good:
            print(f"  missed: {name} {drawn}: {answer.nearest[0].lines}; {answer.differences}; {errors}")
    seconds = (time.perf_counter() - began) / len(PRESETS)
    print(f"named among the equal: {named} of {len(PRESETS)}, with bounds to 1e-3: {close}; {seconds:.2f} s each")


def reports() -> None:
    for title, name, function, kinds in REPORTS:
        answer = check(of_function(function), trimtab.objective(name), spec=name)
        found = [*answer.differences, *answer.notes]
        hits = [one for one in found if one.kind in kinds]
        place = found.index(hits[0]) + 1 if hits else 0
        print(f"{title}, as {name}: {f'difference {place} of {len(found)}' if hits else 'NOT NAMED'}")
        for one in hits[:1] or found:
            print(f"    {one.kind}: {one.text}")


def main() -> None:
    parser = options_of(__doc__, seed=0)
    parser.add_argument("parts", nargs="+", choices=(*SETS, "names", "reports", "peers"))
    parser.add_argument("--out", type=Path, default=PAGE, help="a page that ends in the table of peers, a new one then")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for group in SETS:
        if group in arguments.parts:
            slips(group)
    if "names" in arguments.parts:
        names(arguments.seed)
    if "reports" in arguments.parts:
        reports()
    if "peers" in arguments.parts:
        from loss_peers import HEAD, table

        arguments.out.write_text(arguments.out.read_text().partition(HEAD)[0] + table())


if __name__ == "__main__":
    main()
