"""The base class of recipe sections, which is frozen and strict, and the types of their values."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]

# Values beyond these limits do not fit into 32-bit integers, float32 tensors, or the waits of operating systems, which
# count milliseconds in 32 bits.
MAX_INT = 2**31 - 1
MAX_FLOAT = 1e30
MAX_SECONDS = 1e6
Count = Annotated[int, Field(gt=0, le=MAX_INT)]
Whole = Annotated[int, Field(ge=0, le=MAX_INT)]
Processes = Annotated[int, Field(gt=0, le=1024)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Share = Annotated[float, Field(ge=0, lt=1)]
Placement = Literal["local", "ray"]


class Section(BaseModel):
    """A section: unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PluginSection(Section):
    """A section that names a part and contains the keywords of that part."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="after")
    def _check_magnitudes(self) -> PluginSection:
        """Raises an error for numbers that are too large to compute with; the part itself checks everything else."""
        for key, value in self.keywords.items():
            is_large_integer = isinstance(value, int) and abs(value) > MAX_INT
            is_large_real = isinstance(value, float) and math.isfinite(value) and abs(value) > MAX_FLOAT
            if is_large_integer or is_large_real:
                raise ValueError(f"{key} = {str(value)[:20]} is too large to compute with: lower it")
        return self

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
