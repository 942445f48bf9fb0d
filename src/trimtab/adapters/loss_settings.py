"""Settings that only a trainer's own policy loss reads (loss_settings.csv); an objective leaves them without effect.

A setting becomes a keyword of the objective if both mean the same; otherwise it is refused, with what replaces it.
Settings of losses that no preset has, like verl's `clip_cov`, are ignored: they are read only if that loss is chosen.
"""

from __future__ import annotations

import csv
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trimtab.errors import TrimtabError


class LossSetting(NamedTuple):
    """A setting of a trainer's own loss; a value other than the default is refused, or passed to the objective."""

    default: Any  # the trainer's default
    instead: str = ""  # what replaces the setting in the objective; empty if nothing does
    keyword: str = ""  # the keyword of the objective that gets the value; empty if the setting is refused


LossSettings = Mapping[str, LossSetting]


def _tables() -> dict[str, dict[str, LossSetting]]:
    """Returns table -> setting -> `LossSetting`, from loss_settings.csv, where a default is JSON or a plain word."""
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
"""Settings by table. TRL: fields of `GRPOConfig` and `AsyncGRPOConfig`. VERL_ACTOR: `actor_rollout_ref.actor`.
VERL_CORRECTION: `algorithm.rollout_correction` if its `rollout_is` is Trimtab's. SKYRL: `trainer.algorithm`. NEMO_RL:
keys of `loss_fn`, as attributes of `ClippedPGLossFn`. MILES: flags of Miles and slime that `policy_loss` reads.
MILES_TIS: flags that their own weights read. AREAL: keys of `actor`. OPENRLHF: arguments of `PolicyLoss`."""

_ABSENT = object()


def chosen(settings: LossSettings, configuration: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that are not at the trainer's default, with their values.

    configuration: an object with attributes or a mapping; `a.b` is the field b of its field a. A setting that it lacks
    counts as default.
    """
    found = {name: _value(configuration, name) for name in settings}
    return {name: value for name, value in found.items() if value not in (_ABSENT, settings[name].default)}


def _value(configuration: Any, name: str) -> Any:
    for key in name.split("."):
        is_table = isinstance(configuration, Mapping)
        configuration = configuration.get(key, _ABSENT) if is_table else getattr(configuration, key, _ABSENT)
    return configuration


def refuse(trainer: str, settings: LossSettings, names: Iterable[str], where: str = "In the objective") -> None:
    """Raises `TrimtabError` if `names` is not empty: only the trainer's own loss would read these settings.

    where: the first words of the sentence that says what replaces them.
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
