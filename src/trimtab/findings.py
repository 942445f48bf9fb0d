"""The record of a finding, the same for `doctor`, which checks an installation, and `diagnose`, which reads data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status  # ok, note (may matter) or fail (must be repaired)
    name: str  # what was checked
    detail: str  # what was found
    next_step: str = ""  # what to do about it; empty if nothing

    @property
    def text(self) -> str:
        return f"{self.detail}; {self.next_step}" if self.next_step else self.detail
