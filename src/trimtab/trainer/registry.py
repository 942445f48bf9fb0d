"""Looks up the classes of a part of recipes, such as tasks or rewards, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trimtab.errors import TrimtabError, did_you_mean, explain


class Registry(NamedTuple):
    """Pydantic classes by name, for one part of recipes. The fields of a class are its keywords in a recipe."""

    part: str  # what messages call such a class
    classes: Mapping[str, str]  # `module:Class` below `trimtab.trainer`, imported when used: some need heavy libraries
    own: str  # ends the message for an unknown name: how to use a class or function of one's own

    def names(self) -> list[str]:
        return sorted(self.classes)

    def options(self, name: str) -> dict[str, FieldInfo]:
        """Returns type, default and description of every keyword, for help texts and `trimtab recipes --keys`."""
        return {field.alias or key: field for key, field in self._class_of(name).model_fields.items()}

    def read(self, name: str, keywords: Mapping[str, Any]) -> Any:
        """Returns an object of the class `name` with these keywords. Raises `TrimtabError` if they are not valid."""
        try:
            return self._class_of(name)(**keywords)
        except ValidationError as error:
            raise TrimtabError(f"{self.part} {name!r}: {explain(error, self.options(name))}") from None

    def _class_of(self, name: str) -> Any:
        if name not in self.classes:
            raise TrimtabError(f"unknown {self.part} {name!r}{did_you_mean(name, self.classes)}; {self.own}")
        module, _, kind = self.classes[name].partition(":")
        return getattr(importlib.import_module(f"trimtab.trainer.{module}"), kind)
