"""`trimtab check-loss`: checks whether a loss function computes the objective that it is meant to compute."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.output import Json, check_page, only_json, print_result
from trimtab.errors import TrimtabError

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function of log-probs, mask and advantages, a class or module that is one, or a method of a TRL "
        "trainer. Its file is imported, in a process with limits of time and memory. With --allow-code also "
        "module:function of an installed package.",
    ),
]
As = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="NAME",
        help="The objective it is meant to be, also NAME:KEY=VALUE,... Without it: which objective it is.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE...",
        help="What takes a field (current=new_lp), or a value of a parameter (eps=0.2), of verl's configuration "
        "(config.clip_ratio_c=10) or of TRL's (loss_type=cispo).",
    ),
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Import an installed package.")]
Ignore = Annotated[
    list[str] | None, typer.Option(metavar="KIND", help="A kind of difference that does not count; may be repeated.")
]
Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="The check is ended after this time.")]
HtmlPage = Annotated[Path | None, typer.Option(metavar="PAGE", help="Write a page with the weights of both.")]


def check_loss(
    target: Target,
    name: As = None,
    arguments: Arguments = None,
    trusted: AllowCode = False,
    ignore: Ignore = None,
    timeout: Timeout = 120.0,
    as_json: Json = False,
    html: HtmlPage = None,
) -> None:
    """Probe a loss function: is it the objective that it is meant to be, and where is it not?

    Its gradient is compared with that of the objective, in float64: policies, bounds, weights, masks, KL, padding,
    denominators and micro-batches. Parameters are known by their names, as verl, TRL, slime, Miles, prime-rl and
    Trimtab call them.
    """
    check_page(html, "--html")
    place, _, function = target.rpartition(":")
    if not (place and function):
        raise TrimtabError(f"{target!r} names no function: write FILE.py:FUNCTION")
    if not place.endswith(".py") and not trusted:
        raise TrimtabError(
            f"{target} is code of an installed package, which would be imported: read it, then add --allow-code"
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise TrimtabError(f"there is no file {place}")
    from trimtab.check_loss.isolated import check_target

    with only_json(as_json):
        found = check_target(
            target,
            timeout,
            objective=_section(name),
            spec=(name or "").rstrip(":"),
            arguments=_values(",".join(arguments or []), "--arguments"),
            ignore=ignore or [],
            trusted=trusted,
            command="" if html is None else shlex.join(["trimtab", *sys.argv[1:]]),
        )
        if html is not None:
            from trimtab.runs.atomic import write_output

            write_output(html, found.pop("html").encode())
    text = found.pop("text")
    print_result(as_json, found | {"page": html}, text if html is None else f"{text}\npage: {html}")
    if not found["equal"]:
        raise typer.Exit(1)


def _section(name: str | None) -> dict[str, Any] | None:
    """Returns an `[objective]` section for NAME:KEY=VALUE,..."""
    if name is None:
        return None
    from trimtab.objectives.lookup import split_name

    objective, rest = split_name(name)
    return {"name": objective, **_values(rest, f"objective {name!r}")}


def _values(text: str, where: str) -> dict[str, Any]:
    """Returns the values of `KEY=VALUE,...`; `where` names their origin in error messages."""
    from trimtab.trainer.config import parse_override, split_overrides

    return dict(map(parse_override, split_overrides(text, where)))
