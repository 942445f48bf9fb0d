"""The reward of a mixture of tasks: each response is scored by the rewards of the task that its problem is from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from trimtab.trainer import rewards
from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.types import Problem, RewardSpec, Task


class RewardPart(BaseModel):
    """One reward of a task, with its own keywords."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    weight: float = 1.0


class ByTask(Reward):
    """The weighted sum of the rewards of the problem's task, in a mixture."""

    rewards: dict[str, list[RewardPart]] = Field(
        min_length=1,
        description="for each label of a task a list of tables: `name`, `weight`, and the reward's keywords",
    )

    def build(self, task: Task) -> Built:
        specs = {
            label: [RewardSpec(part.name, part.weight, options=part.model_extra or {}) for part in parts]
            for label, parts in self.rewards.items()
        }
        entries = {label: rewards.weighted(of_task, task) for label, of_task in specs.items()}

        def by_task(response: Response, problem: Problem) -> float:
            label = problem.extra.get("task")
            if label not in entries:
                raise ValueError(f"by-task has no rewards for problems of {label!r}, only for {', '.join(entries)}")
            return sum(entry.weight * entry.built.function(response, problem) for entry in entries[label])

        isolated = any(entry.built.isolated for of_task in entries.values() for entry in of_task)
        return Built(by_task, isolated=isolated)
