"""The interface of a built-in reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from trimtab.rewards.response import Response
from trimtab.types import Problem

RewardFunction = Callable[[Response, Problem], Any]


class RewardOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Built:
    """A reward function and whether it may only run in a worker process (it can hang, or is not ours)."""

    function: RewardFunction
    isolated: bool
