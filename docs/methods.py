"""Writes the section of docs/methods.md that follows from the presets: `python docs/methods.py`.

A preset's sentences are those of `objectives/presets.py`, its equation that of the built objective, its defaults
`keywords_of`. The page of the site also has its code (`with_code`).
"""

from __future__ import annotations

import re
import textwrap
from inspect import Parameter
from pathlib import Path

from trimtab.objectives import keywords_of, objective, objectives
from trimtab.objectives.presets import PRESETS

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- presets: written by docs/methods.py -->\n", "<!-- end of presets -->\n"
SHARED = {"denominator", "kl", "kl_coef", "entropy_coef", "aggregation", "length_max"}


def section(name: str) -> str:
    """One preset: its sentences, its equation with the default numbers, and its own keywords."""
    preset = PRESETS[name]
    one, keywords = objective(name), keywords_of(name)
    terms = [line for line in one.equation().splitlines() if not line.startswith(("  D: ", "  A: "))]
    defaults = {key: value for key, value in keywords.items() if key not in SHARED}
    defaults |= {"aggregation": one.aggregation.kind} if "aggregation" in keywords else {}
    defaults |= {"advantage": one.advantage}
    listed = ", ".join(f"`{key}={_value(value)}`" for key, value in defaults.items())
    block = ["```text", *terms, "```"]
    last = f"Defaults: {listed}. Source: {preset.source}"
    return "\n".join([f"### `{name}`", "", f"{preset.does} {preset.when}", "", *block, "", last, ""])


def _value(value: object) -> str:
    return "none" if value is None else "required" if value is Parameter.empty else str(value).lower()


def presets() -> str:
    """The whole section: every preset in the order of `objectives()`."""
    return "\n".join(map(section, objectives())) + "\n"


def written(page: str) -> str:
    """The page with its section of presets written anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", flags=re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{presets()}{END}", page)


def with_code(page: str) -> str:
    """The page of the site: under each preset the function that `trimtab explain NAME --code` prints, folded."""
    for name in objectives():
        code = objective(name).code(f"trimtab explain {name} --code")
        folded = textwrap.indent(f"```python\n{code}```\n", "    ")
        page = page.replace(section(name), f'{section(name)}\n??? note "In plain PyTorch"\n\n{folded}')
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
