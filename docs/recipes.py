"""Generates the page of all recipe keys from the schema; it is built with the site (docs/site.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimtab.cli.recipe_keys import Key, default_text, keys_of, sections
from trimtab.objectives import keywords_of, objectives
from trimtab.trainer import rewards, tasks

HEAD = """# Recipes: every key

A recipe is a TOML file, or the same as a mapping in Python. What ships with the package is listed by `trimtab recipes`;
`trimtab show RECIPE` prints one with every default filled in. This page is generated from the schema;
`trimtab recipes --keys` prints the same keys.

```toml
base = "quickstart"           # start from this recipe; everything below changes it

[task]                        # a section
name = "file"                 # other keys of this section are those of the task named
path = "train.jsonl"

[objective]
name = "icepop"
weight_max = 3.0

[[reward]]                    # one of a list of rewards
name = "math"

[trainer]
steps = 100
```

- `--set section.key=value` changes one key on the command line: `--set engine.vllm.memory=0.8`. A value is TOML; a bare
  word is text. `--set base=laboratory` changes the base.
- `base` names a shipped recipe or a `.toml` file. A section of the recipe changes the same section of its base key by
  key; an objective or a task of another name, and a surrogate of another kind, start from their own defaults instead.
- `unset = ["objective.clip_high", "prefix"]` takes keys and sections of the base back, where a message says to leave
  one out that the base sets; on the command line also `--set unset=prefix`.
- A path in a recipe file is relative to that file, one on the command line to the current folder.
- Unknown keys, values out of bounds and settings that contradict each other are refused in one line, before a model is
  loaded. A key that has no effect beside the others is a warning.
- The defaults below are those of the schema. What a run used, with everything resolved, is its `config.toml`.
- "none" means that the key is absent; TOML has no null.
"""

METHODS = """## Objectives: the keywords of `[objective]`

What they mean: [methods](methods.md); `trimtab explain NAME` prints the equation. `clip_low`, `clip_high` are the eps
of `[1 - clip_low, 1 + clip_high]`, `clip_dual` is the bound for negative advantages; `weight_*` bound the importance
weight and `keep_*` the ratio that decides what is rejected, all of them the ratio itself; `normalize` divides weights
by their mean.

All take `denominator` (`original` or `kept`), `kl` (`k1`, `k2`, `k3`, `unbiased`) with `kl_coef`, and `entropy_coef`;
all with an aggregation in the table take `aggregation` (`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, or
`constant` with `length_max`).
"""


TASKS = "What they mean in prose, with examples: [reference](reference-tasks.md).\n"

REWARDS = (
    "Beside `name`, `weight` and `timeout`. Without any `[[reward]]` the task's own reward is used. A "
    "`module:function` of your own takes no keywords.\n"
)


def markdown() -> str:
    """Returns the whole page."""
    blocks = [
        f"## {f'`{section.title}`' if section.name else section.title}\n\n{section.about}\n\n{_table(section.keys)}"
        for section in sections()
    ]
    blocks += [METHODS + "\n" + _objectives(), "## Tasks: the keywords of `[task]`\n\n" + TASKS]
    blocks += [_part(name, keys_of(tasks.KINDS.options(name), nested=True)) for name in tasks.KINDS.names()]
    blocks += ["## Rewards: the keywords of `[[reward]]`\n\n" + REWARDS]
    blocks += [_part(name, keys_of(rewards.KINDS.options(name), nested=True)) for name in rewards.KINDS.names()]
    return "\n".join([HEAD, *blocks])


def _objectives() -> str:
    shared = {"denominator", "kl", "kl_coef", "entropy_coef", "aggregation", "length_max"}
    lines = ["| `name` | its own keywords | aggregation |", "|---|---|---|"]
    for name in objectives():
        keywords = keywords_of(name)
        own = ", ".join(f"`{key} = {default_text(value)}`" for key, value in keywords.items() if key not in shared)
        length_max = f", `length_max = {keywords['length_max']}`" if keywords.get("length_max") else ""
        lines.append(f"| `{name}` | {own or '-'} | {keywords.get('aggregation', '-')}{length_max} |")
    return "\n".join(lines) + "\n"


def _part(name: str, keys: Mapping[str, Key]) -> str:
    return f'### `name = "{name}"`\n\n{_table(keys)}'


def _table(keys: Mapping[str, Key]) -> str:
    lines = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for name, key in keys.items():
        default = key.default if key.default in ("required", "none") else f"`{key.default}`"
        lines.append(f"| `{name}` | {_type(key.type)} | {default} | {_cell(key.about)} |")
    return "\n".join(lines) + "\n"


def _type(text: str) -> str:
    """Returns a type whose alternatives, in quotes, are set as code."""
    return re.sub(r'"([^"]*)"', r"`\1`", text)


def _cell(text: str) -> str:
    # In Markdown `<name>` is a tag and a bar ends the cell.
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
