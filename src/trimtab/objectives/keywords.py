"""Changes an objective by keywords, which set fields of its parts, and by tables that give whole parts, as in a recipe.

`Preset.with_keywords` applies both. The tables are `ratio`, `surrogate`, `weight` and `mask`; `centering` is a bool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from trimtab.corrections.divergences import DIVERGENCES
from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, PrefixBudget, Veto
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import ratio_bounds
from trimtab.objectives.objective import Objective
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Surrogate, Unclipped


class Keywords(TypedDict, total=False):
    """The keywords of `trimtab.objective`: their types, and the path of the `Objective` field that each keyword sets.

    A preset takes the keywords whose fields it has, and those of its masks (`MASK_KEYWORDS`).
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
    # Fields of masks (`MASK_KEYWORDS`). `k2_max` and `k3_max` are for a preset with several divergences.
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
    # Whole parts, or tables of their fields; and the kind of advantage, only together with parts.
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
"""End of a message that asks to leave a keyword out."""

PART_KEYS = ("ratio", "surrogate", "weight", "mask", "centering")
TABLES = {"ratio": Ratio, "weight": Weight}
PLAIN = {"centering": bool, "advantage": str}
"""Types of values that are given without a `kind`: parts (`TABLES`) and plain values (`PLAIN`)."""

SURROGATES: dict[str, type[Surrogate]] = {
    "clipped": Clipped,
    "reinforce": Reinforce,
    "unclipped": Unclipped,
    "log-prob": LogProb,
    "regression": Regression,
    "shaped": Shaped,
    "second-moment": ratio_bounds.SecondMoment,
    "growing-clip": ratio_bounds.GrowingClip,
    "banded": ratio_bounds.Banded,
    "aged-clip": ratio_bounds.AgedClip,
    "soft-gate": ratio_bounds.SoftGate,
    "gamma-weight": ratio_bounds.GammaWeight,
    "geometric-clip": ratio_bounds.GeometricClip,
    "quadratic-penalty": ratio_bounds.QuadraticPenalty,
}

MASKS: dict[str, type[Mask]] = {
    "band": Band,
    **dict.fromkeys(DIVERGENCES, Divergence),
    "veto": Veto,
    "opsm": OPSM,
    "prefix-budget": PrefixBudget,
}
"""Classes by `kind`. For `Divergence`, `kind` is the name of the divergence."""

MASK_KEYWORDS: dict[type[Mask], dict[str, str]] = {
    Band: {"keep_min": "min", "keep_max": "max"},
    Divergence: {"divergence_max": "max"},
    OPSM: {"delta": "delta"},
    PrefixBudget: {"divergence_max": "max", "budget": "budget", "quantile": "quantile", "weight_min": "weight_min"},
}
"""The field of a mask that each keyword sets."""


@dataclass(frozen=True)
class Preset:
    """A named objective with its description and keywords."""

    objective: Objective
    does: str = ""  # what it does, in one line
    when: str = ""  # when to use it
    source: str = ""  # where the objective and its defaults come from
    excluded: tuple[str, ...] = ()  # keywords that it does not take

    @cached_property
    def paths(self) -> dict[str, str]:
        """The path of the field that each keyword of this preset sets."""
        masks = self.objective.masks
        # Each of several divergences has a keyword of its own: k2_max, k3_max.
        of_masks = {
            f"{mask.kind}_max" if isinstance(mask, Divergence) and len(masks) > 1 else key: f"masks.{place}.{name}"
            for place, mask in enumerate(masks)
            for key, name in MASK_KEYWORDS.get(type(mask), {}).items()
        }
        others = {key: path for key, path in PATHS.items() if key not in (*of_masks, *self.excluded)}
        return {**of_masks, **{key: path for key, path in others.items() if self._has(key, path)}}

    def _has(self, key: str, path: str) -> bool:
        """Whether the objective has the field at `path`. A truncated weight has no `weight_min`."""
        try:
            value = value_at(self.objective, path)
        except AttributeError:
            return False
        return not (key == "weight_min" and value is None)

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each keyword of this preset."""
        return {key: value_at(self.objective, path) for key, path in self.paths.items()}

    def with_keywords(self, given: Mapping[str, Any]) -> Objective:
        """Returns the objective with fields set by keywords, parts replaced, and masks added.

        Raises `TrimtabError` for a wrong type, a value that a part or `Objective` refuses, or one without effect.
        """
        base = self.objective
        parts = parse_parts(base, {key: given[key] for key in (*PART_KEYS, "advantage") if key in given})
        values = {key: convert(key, given[key], TYPES[key]) for key in given if key in self.paths}
        for key, value in values.items():
            part = self.paths[key].partition(".")[0]
            if part in parts and part != "masks" and value != value_at(base, self.paths[key]):
                raise TrimtabError(f"{key} has no effect beside the given {part}: leave it out{UNSET}")
        if "kl" in values and "kl_coef" not in values and base.kl.coef == 0:
            raise TrimtabError(f"kl = {values['kl']!r} has no effect without kl_coef: set it, or leave kl out")
        if base.aggregation.length_max is not None and values.get("aggregation", "constant") != "constant":
            values.setdefault("length_max", None)
        fields = self._fields(values)
        if "masks" in parts:
            parts["masks"] = (*fields.get("masks", base.masks), *parts["masks"])
        return replace(base, source="" if parts else self.source, **{**fields, **parts})

    def _fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the changed fields of `Objective`: for `weight_max=3`, the field `weight` with this bound."""
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
            except ValueError as error:  # the message names a field, which need not be a keyword
                is_named = any(key in str(error) for key in given)
                raise TrimtabError(str(error) if is_named else f"{', '.join(given)}: {error}") from None
            name, _, index = part.partition(".")
            if index:
                masks = fields.get(name, self.objective.masks)
                built = (*masks[: int(index)], built, *masks[int(index) + 1 :])
            fields[name] = built
        return fields


def value_at(objective: Objective, path: str) -> Any:
    """Returns the field at a path such as `weight.max` or `masks.0.min`. Raises `AttributeError` if there is none."""
    value: Any = objective
    for step in path.split(".") if path else ():
        value = value[int(step)] if step.isdigit() else getattr(value, step)
    return value


def parse_parts(base: Objective, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Objective` that the given parts replace; `masks` has only the masks to add to the base's.

    given: parts by their name in `PART_KEYS`. A part is an instance or a table of its fields, with `kind` for
        surrogates and masks; `mask` is a list of parts, `centering` a bool. `advantage` may be added: a kind.
    Raises `TrimtabError` for unknown names and wrong types.
    """
    built = {key: _parse_part(key, kind, given[key]) for key, kind in TABLES.items() if key in given}
    built |= {key: convert(key, given[key], kind) for key, kind in PLAIN.items() if key in given}
    if "surrogate" in given:
        built["surrogate"] = _parse_kind("surrogate", SURROGATES, Surrogate, given["surrogate"])
    if "mask" in given:
        masks = given["mask"]
        if isinstance(masks, Mapping | str) or not isinstance(masks, Sequence):
            raise TrimtabError("mask is a list of tables: write each as [[objective.mask]]")
        if base.masks and not masks:
            raise TrimtabError(f"mask = [] removes nothing: masks are added to those of {base.name}; leave it out")
        built["masks"] = tuple(_parse_kind("mask", MASKS, Mask, mask) for mask in masks)
    return built


def _parse_kind(what: str, kinds: Mapping[str, type], base: type, given: Any) -> Any:
    if isinstance(given, base):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise TrimtabError(f"{what} is a table with a `kind`, one of {', '.join(kinds)}; not {given!r}")
    kind = given["kind"]
    if kind not in kinds:
        raise TrimtabError(f"unknown {what} {kind!r}{did_you_mean(kind, kinds)}")
    own = given if kinds[kind] is Divergence else {key: value for key, value in given.items() if key != "kind"}
    return _parse_part(f"{what} {kind!r}", kinds[kind], own)


def _parse_part(what: str, part: type, given: Any) -> Any:
    """Builds a part from a table of its fields."""
    if isinstance(given, part):
        return given
    if not isinstance(given, Mapping):
        raise TrimtabError(f"{what} is a table of its fields, not {given!r}")
    known, kinds = {item.name: item for item in fields(part)}, get_type_hints(part)
    for key in given:
        if key not in known:
            raise TrimtabError(f"{what} has no {key!r}{did_you_mean(key, known)}")
    for name, item in known.items():
        if item.default is MISSING and name not in given:
            raise TrimtabError(f"{what} needs {name!r}: give it a value")
    try:
        return part(**{key: convert(key, value, kinds[key]) for key, value in given.items()})
    except ValueError as error:
        raise TrimtabError(f"{what}: {error}") from None


def convert(key: str, value: Any, kind: Any) -> Any:
    """Returns a value that has the type `kind`, or one type of a union. An integer is converted if a float is expected.

    Raises `TrimtabError` for a value of another type. A bool does not count as a number.
    """
    for option in get_args(kind) or (kind,):
        if option is float and isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if option not in (float, int) and isinstance(value, option):
            return value
    raise TrimtabError(f"{key} = {value!r} has the wrong type")
