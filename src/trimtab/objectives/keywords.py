"""Presets: objectives with a name, and the keywords that change their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, TypedDict, get_type_hints

from trimtab.corrections.masks import Mask
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError
from trimtab.objectives.composition import PART_KEYS, convert, parse_parts
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.surrogate import Surrogate


class Keywords(TypedDict, total=False):
    """What `trimtab.objective` takes beside a name: types, and the path of the field of `Objective` that each sets.

    A preset has the keywords whose field it has, and further ones for its masks (`Preset.mask_keywords`).
    """

    weight_min: Annotated[float, "weight.min"]
    weight_max: Annotated[float, "weight.max"]
    normalize: Annotated[bool, "weight.normalize"]
    clip_low: Annotated[float, "surrogate.low"]
    clip_high: Annotated[float, "surrogate.high"]
    clip_dual: Annotated[float | None, "surrogate.dual"]
    power: Annotated[float, "surrogate.power"]
    ceiling: Annotated[float, "surrogate.ceiling"]
    beta: Annotated[float, "surrogate.beta"]
    gamma: Annotated[float, "surrogate.gamma"]
    tau: Annotated[float, "surrogate.tau"]
    form: Annotated[str, "surrogate.form"]
    epsilon: Annotated[float, "surrogate.epsilon"]
    tau_positive: Annotated[float, "surrogate.positive"]
    tau_negative: Annotated[float, "surrogate.negative"]
    k1_positive: Annotated[float, "surrogate.k1_positive"]
    k2_positive: Annotated[float, "surrogate.k2_positive"]
    k1_negative: Annotated[float, "surrogate.k1_negative"]
    k2_negative: Annotated[float, "surrogate.k2_negative"]
    # Bounds of masks: a preset says of which.
    keep_min: float
    keep_max: float
    divergence_max: float
    k2_max: float
    k3_max: float
    delta: float
    budget: float
    quantile: float
    # Every objective has these.
    aggregation: Annotated[str, "aggregation.kind"]
    length_max: Annotated[int, "aggregation.length_max"]
    denominator: Annotated[str, "aggregation.denominator"]
    kl: Annotated[str, "kl.kind"]
    kl_coef: Annotated[float, "kl.coef"]
    entropy_coef: Annotated[float, "entropy_coef"]
    # Whole parts, or tables of their fields (composition.py), and the kind of advantage beside them.
    ratio: Ratio | Mapping[str, Any]
    surrogate: Surrogate | Mapping[str, Any]
    weight: Weight | Mapping[str, Any]
    mask: Sequence[Mask | Mapping[str, Any]]
    centering: bool
    advantage: str


TYPES = get_type_hints(Keywords)
PATHS: dict[str, str] = {
    key: hint.__metadata__[0]
    for key, hint in get_type_hints(Keywords, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}

UNSET = " (unset it where a recipe's base sets it)"
"""Ends a message that asks to leave a keyword out."""


@dataclass(frozen=True)
class Preset:
    """A named objective.

    does: what it does, in a line. when: when to use it. source: where it and its defaults are from.
    mask_keywords: keywords for its masks, with the path of each field. excluded: keywords that it does not take.
    """

    objective: Objective
    does: str = ""
    when: str = ""
    source: str = ""
    mask_keywords: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()

    @cached_property
    def paths(self) -> dict[str, str]:
        """The path of the field that each of its keywords sets."""
        others = {key: path for key, path in PATHS.items() if key not in (*self.mask_keywords, *self.excluded)}
        return {**self.mask_keywords, **{key: path for key, path in others.items() if self._has(key, path)}}

    def _has(self, key: str, path: str) -> bool:
        """Whether the objective has the field. A truncated weight has no lower bound."""
        try:
            value = value_at(self.objective, path)
        except AttributeError:
            return False
        return not (key == "weight_min" and value is None)

    @property
    def defaults(self) -> dict[str, Any]:
        """The value of each of its keywords."""
        return {key: value_at(self.objective, path) for key, path in self.paths.items()}

    def with_keywords(self, given: Mapping[str, Any]) -> Objective:
        """Returns its objective with the fields changed that keywords name, parts replaced, and masks added.

        Raises `TrimtabError` for a wrong type, for what a part or `Objective` refuses, and for what has no effect.
        """
        base = self.objective
        parts = parse_parts(base, {key: given[key] for key in (*PART_KEYS, "advantage") if key in given})
        values = {key: convert(key, given[key], TYPES[key]) for key in given if key in self.paths}
        for key, value in values.items():
            part = self.paths[key].partition(".")[0]
            if part in parts and part != "masks" and value != value_at(base, self.paths[key]):
                raise TrimtabError(f"{key} has no effect beside the given {part}: leave it out{UNSET}")
        if "kl" in values and "kl_coef" not in values and base.kl.coef == 0:
            raise TrimtabError(f"kl = {values['kl']!r} has no effect without kl_coef")
        if base.aggregation.length_max is not None and values.get("aggregation", "constant") != "constant":
            values.setdefault("length_max", None)
        fields = self._fields(values)
        if "masks" in parts:
            parts["masks"] = (*fields.get("masks", base.masks), *parts["masks"])
        return replace(base, **{**fields, **parts})

    def _fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `Objective` that keywords change: for `weight_max=3`, its weight with that bound."""
        by_part: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            by_part.setdefault(self.paths[key].rpartition(".")[0], {})[key] = value
        fields: dict[str, Any] = {}
        for part, given in by_part.items():
            new = {self.paths[key].rpartition(".")[2]: value for key, value in given.items()}
            if not part:
                fields |= new
                continue
            try:
                built = replace(value_at(self.objective, part), **new)
            except ValueError as error:  # a part names its fields, and only some of these are keywords
                is_named = any(key in str(error) for key in given)
                raise TrimtabError(str(error) if is_named else f"{', '.join(given)}: {error}") from None
            name, _, index = part.partition(".")
            if index:
                masks = fields.get(name, self.objective.masks)
                built = (*masks[: int(index)], built, *masks[int(index) + 1 :])
            fields[name] = built
        return fields


def value_at(objective: Objective, path: str) -> Any:
    """Returns the field at a path such as `weight.max` or `masks.0.min`; raises `AttributeError` without one."""
    value: Any = objective
    for step in path.split(".") if path else ():
        value = value[int(step)] if step.isdigit() else getattr(value, step)
    return value
