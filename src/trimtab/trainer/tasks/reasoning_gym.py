"""Any reasoning-gym dataset, by name and config, scored by that dataset's own scorer.

Problems carry in `extra` what regenerates their entry (dataset, config, seed, size, index); nothing else is stored.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.tasks.style import StyleOptions, build_template, limits
from trimtab.trainer.tasks.task import BuiltTask, Procedural
from trimtab.trainer.tasks.templates import Chat
from trimtab.types import Problem, RewardSpec

# Entry i of a dataset is usually drawn with seed + i: neighbouring seeds would give the two splits the same entries.
SEED_STRIDE = 100_000_000
STEP = 7919  # a prime: where to look next when a training question is also a test question
REDRAWS = 64
DRAWS = 4  # entries drawn per wanted test problem, to allow for repeated questions
CHAT = Chat(
    "{question}\n\nThink it through, then write the final answer between <answer> and </answer>.",
    answer="<answer>{answer}</answer>",
)


class ReasoningGym(StyleOptions):
    dataset: str = Field(description="a reasoning-gym dataset, e.g. chain_sum")
    config: dict[str, Any] = Field(default_factory=dict, description="its own options, without seed and size")
    size: int = Field(4096, ge=1, description="problems in the training split")
    holdout: int = Field(128, ge=1, description="problems in the test split")

    def build(self) -> BuiltTask:
        where = f"reasoning-gym {self.dataset!r}"
        train_seed, test_seed = 2 * SEED_STRIDE * self.seed, SEED_STRIDE * (2 * self.seed + 1)
        draws = self._problems(test_seed, DRAWS * self.holdout, "test")
        test: dict[str, Problem] = {}
        for problem in draws:
            test.setdefault(problem.question, problem)
            if len(test) == self.holdout:
                break
        else:
            raise TrimtabError(
                f"{where}: only {len(test)} different questions in {len(draws)} draws, holdout wants {self.holdout}; "
                "lower holdout or widen its config"
            )
        excluded = set(test)
        shot_count = self.examples if self.style == "few-shot" else 0
        source = self._problems(train_seed, self.size + shot_count, "train")

        def train(index: int) -> Problem:
            for attempt in range(REDRAWS):
                problem = source[(index + attempt * STEP) % len(source)]
                if problem.question not in excluded:
                    return problem
            raise TrimtabError(
                f"{where}: nearly every question is in the test split; lower holdout or widen its config"
            )

        shots = [train(self.size + offset) for offset in range(shot_count)]
        if any(not problem.answer for problem in shots):
            raise TrimtabError(f"{where}: it has no written answers to show; use style = 'chat', or examples = 0")
        excluded.update(problem.question for problem in shots)
        template = build_template(self, shots, CHAT)
        stop, max_tokens = limits(self, template, shots, [problem.answer for problem in test.values()], where)
        tag = {"tag": "answer"} if isinstance(template, Chat) and template.answer == CHAT.answer else {}
        return BuiltTask(
            name=f"reasoning-gym/{self.dataset}",
            train=Procedural(self.size, train),
            test=list(test.values()),
            template=template,
            rewards=(RewardSpec("reasoning-gym", options=tag),),
            stop=stop,
            max_tokens=max_tokens,
        )

    def _problems(self, seed: int, size: int, split: str) -> Procedural:
        """Returns the problems of one generated data set."""
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        name, where = self.dataset, f"reasoning-gym {self.dataset!r}"
        if name not in DATASETS:
            raise TrimtabError(f"reasoning-gym has no dataset {name!r}{did_you_mean(name, DATASETS)}")
        try:
            entries = reasoning_gym.create_dataset(name, seed=seed, size=size, **self.config)
        except Exception as error:  # each dataset checks its config in its own way, mostly with assertions
            raise TrimtabError(f"{where}: config refused: {error or type(error).__name__}") from None

        def make(index: int) -> Problem:
            try:
                entry = entries[index]
            except Exception as error:
                raise TrimtabError(f"{where}: cannot make problem {index}: {type(error).__name__}: {error}") from None
            return Problem(
                id=f"{name}-{split}-{index}",
                question=entry["question"],
                answer="" if entry["answer"] is None else str(entry["answer"]),
                extra={"dataset": name, "config": self.config, "seed": seed, "size": size, "index": index},
            )

        return Procedural(size, make)
