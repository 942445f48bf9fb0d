"""The `exact` reward: the answer alone, ended as the task asks."""

from __future__ import annotations

from pydantic import Field

from trimtab.rewards.base import Built, RewardOptions
from trimtab.rewards.response import Response
from trimtab.types import Problem, Task


class Options(RewardOptions):
    require_stop: bool = Field(True, description="0 for a response cut by the length limit, however it begins")


def build(options: Options, task: Task) -> Built:
    """1 if the text before the stop string equals the answer (surrounding blanks aside), else 0."""
    stops = task.stop

    def exact(response: Response, problem: Problem) -> float:
        if options.require_stop and response.finish != "stop":
            return 0.0
        wanted = problem.answer
        for stop in stops:
            wanted = wanted.removesuffix(stop)
        return float(response.body(stops) == wanted.strip())

    return Built(exact, isolated=False)
