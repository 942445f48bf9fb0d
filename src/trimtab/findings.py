"""The record of a finding, the same for `doctor`, which checks an installation, and `diagnose`, which reads data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    status: ok, note (may matter) or fail (must be repaired). name: what was checked. detail: what was found.
    next_step: what to do about it; empty if nothing.
    """

    status: Status
    name: str
    detail: str
    next_step: str = ""

    @property
    def text(self) -> str:
        return f"{self.detail}; {self.next_step}" if self.next_step else self.detail
