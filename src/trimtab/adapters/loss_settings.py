"""Settings that the policy loss of each trainer reads, and what becomes of them beside a loss of Trimtab.

A setting without effect would be believed: each is taken over as a keyword of the objective where both mean the same,
or refused with what replaces it (loss_settings.csv). Those of losses that no preset has, such as verl's `clip_cov`, are
left alone: the trainer itself reads them only where that loss is chosen. Versions are those of docs/adapters.md.
"""

from __future__ import annotations

import csv
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trimtab.errors import TrimtabError


class LossSetting(NamedTuple):
    """A setting that is refused, or taken over, where its value is not the trainer's default.

    default: that of the trainer, which a user who sets nothing has. instead: what replaces it in the objective; empty
    where nothing does. keyword: the keyword of an objective as which it is taken over; empty where it is refused.
    """

    default: Any
    instead: str = ""
    keyword: str = ""


LossSettings = Mapping[str, LossSetting]


def _tables() -> dict[str, dict[str, LossSetting]]:
    """Returns the settings by their table in loss_settings.csv, where a default is a word or a value of JSON."""
    text = (importlib.resources.files("trimtab.adapters") / "loss_settings.csv").read_text(encoding="utf-8")
    found: dict[str, dict[str, LossSetting]] = {}
    for row in csv.DictReader(text.splitlines()):
        try:
            default = json.loads(row["default"])
        except ValueError:
            default = row["default"]
        found.setdefault(row["table"], {})[row["setting"]] = LossSetting(default, row["instead"], row["keyword"])
    return found


SETTINGS: Mapping[str, LossSettings] = _tables()
"""By the name of the table. TRL: `GRPOConfig` and `AsyncGRPOConfig`. VERL_ACTOR: `actor_rollout_ref.actor`, and
VERL_CORRECTION `algorithm.rollout_correction`, where `rollout_is` names Trimtab. SKYRL: `trainer.algorithm`. NEMO_RL:
keys of `loss_fn`, as attributes of `ClippedPGLossFn`. MILES: flags of Miles and slime that `policy_loss` reads, and
MILES_TIS those that their own weights read. AREAL: keys of `actor`. OPENRLHF: arguments of `PolicyLoss`."""

_ABSENT = object()


def chosen(settings: LossSettings, configuration: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that are not at the trainer's default, with their values.

    configuration: an object with attributes or a mapping; `a.b` is the field b of its field a. What it does not have is
    at its default.
    """
    found = {name: _value(configuration, name) for name in settings}
    return {name: value for name, value in found.items() if value not in (_ABSENT, settings[name].default)}


def _value(configuration: Any, name: str) -> Any:
    for key in name.split("."):
        is_table = isinstance(configuration, Mapping)
        configuration = configuration.get(key, _ABSENT) if is_table else getattr(configuration, key, _ABSENT)
    return configuration


def refuse(trainer: str, settings: LossSettings, names: Iterable[str], where: str = "In the objective") -> None:
    """Raises `TrimtabError` if there are names: settings that only the trainer's own loss would read.

    where: begins what replaces them.
    """
    if names := list(names):
        replaced = ((name, settings[name].instead) for name in names)
        instead = "; ".join(f"{name} is {ours}" if ours else f"{name} has no equivalent" for name, ours in replaced)
        raise TrimtabError(
            f"{', '.join(names)}: only {trainer}'s own loss reads this, leave it out. {where}: {instead}"
        )


def refuse_chosen(trainer: str, table: str, configuration: Any, where: str) -> None:
    """Raises `TrimtabError` for settings of a table that are not at the trainer's default in a configuration."""
    refuse(trainer, SETTINGS[table], chosen(SETTINGS[table], configuration), where)
