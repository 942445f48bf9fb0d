"""What every section of a recipe is: closed, frozen, strict."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A closed section: unknown keys are errors, values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NamedPart(BaseModel):
    """A section that names a part and carries that part's own keywords."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    name: str

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
