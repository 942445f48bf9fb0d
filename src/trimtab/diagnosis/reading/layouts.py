"""The roles that columns may have, and the layout of each framework's files: a row of `layouts.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.diagnosis.records import read_table
from trimtab.errors import TrimtabError, did_you_mean

LOGPS = ("logp_behavior", "logp_proximal", "logp_current")
TOKEN_ROLES = (
    *(*LOGPS, "logp_rescored", "response_ids", "loss_mask", "padding_mask"),
    *("loss_weight", "entropy", "policy_version", "turn"),
)
SAMPLING = ("temperature", "top_p", "top_k", "logprobs")
ROW_ROLES = (
    *("step", "group", "prompt", "proximal_version", "reward", "advantage", "sampling", *SAMPLING, "off_policy"),
    *("response_length", "prompt_length", "sample_id", "sample_mask", "prompt_ids"),
)
ROLES = TOKEN_ROLES + ROW_ROLES
VERSIONS = ("policy_version", "proximal_version")
"""Roles that are also read under these names in the files of every framework: few write them, and users add them."""
EITHER_SHAPE = ("policy_version", "advantage")  # roles that frameworks write per token or per response


@dataclass(frozen=True)
class Layout:
    """The file layout of a framework: a row of `layouts.toml`, where each key is explained."""

    framework: str
    columns: Mapping[str, tuple[str, ...]]
    signs: tuple[frozenset[str], ...]
    advice: str
    trainer_advice: str = ""
    folder: str = ""
    engine: str = ""
    padded: bool = False
    whole: bool = False
    repeats: bool = False
    prompt_groups: bool = False
    step_in_name: str = ""
    synchronous: str = ""


def _layout(row: Mapping[str, Any]) -> Layout:
    columns = {role: tuple(names) for role, names in row["columns"].items()}
    if unknown := columns.keys() - set(ROLES):
        raise ValueError(f"layouts.toml, {row['framework']}: no role {unknown}")
    return Layout(**{**row, "columns": columns, "signs": tuple(map(frozenset, row["signs"]))})


LAYOUTS = {row["framework"]: _layout(row) for row in read_table("layouts.toml")["layout"]}
"""All layouts by framework, in the order in which they are tried."""
LOGP_COLUMNS = {name for layout in LAYOUTS.values() for role in LOGPS for name in layout.columns.get(role, ())}
TRAINER_COLUMNS = LOGP_COLUMNS - {name for layout in LAYOUTS.values() for name in layout.columns["logp_behavior"]}


def layout_of_framework(framework: str) -> Layout:
    """Returns the layout of a framework. `slime` writes the files of Miles."""
    name = "miles" if framework == "slime" else framework
    if name not in LAYOUTS:
        raise TrimtabError(f"unknown framework {framework!r}{did_you_mean(framework, [*LAYOUTS, 'slime'])}")
    return LAYOUTS[name]
