"""Any reasoning-gym dataset, by name and config, scored by that dataset's own scorer.

Problems carry in `extra` what regenerates their entry (dataset, config, seed, size, index); nothing else is stored.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.tasks.style import StyleOptions, build_template, limits
from trimtab.tasks.task import BuiltTask, Procedural
from trimtab.tasks.templates import Chat
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


class Options(StyleOptions):
    dataset: str = Field(description="a reasoning-gym dataset, e.g. chain_sum")
    config: dict[str, Any] = Field(default_factory=dict, description="its own options, without seed and size")
    size: int = Field(4096, ge=1, description="problems in the training split")
    holdout: int = Field(128, ge=1, description="problems in the test split")


def build(options: Options) -> BuiltTask:
    where = f"reasoning-gym {options.dataset!r}"
    train_seed, test_seed = 2 * SEED_STRIDE * options.seed, SEED_STRIDE * (2 * options.seed + 1)
    test = _test_split(_Source(options, test_seed, DRAWS * options.holdout, "test"), options.holdout)
    excluded = {problem.question for problem in test}
    shot_count = options.examples if options.style == "few-shot" else 0
    source = _Source(options, train_seed, options.size + shot_count, "train")

    def train(index: int) -> Problem:
        for attempt in range(REDRAWS):
            problem = source[(index + attempt * STEP) % source.size]
            if problem.question not in excluded:
                return problem
        raise TrimtabError(f"{where}: nearly every question is in the test split; lower holdout or widen its config")

    shots = [train(options.size + offset) for offset in range(shot_count)]
    if any(not problem.answer for problem in shots):
        raise TrimtabError(f"{where}: it has no written answers to show; use style = 'chat', or examples = 0")
    excluded.update(problem.question for problem in shots)
    template = build_template(options, shots, CHAT)
    stop, max_tokens = limits(options, template, shots, [problem.answer for problem in test], where)
    tag = {"tag": "answer"} if isinstance(template, Chat) and template.answer == CHAT.answer else {}
    return BuiltTask(
        name=f"reasoning-gym/{options.dataset}",
        train=Procedural(options.size, train),
        test=test,
        template=template,
        rewards=(RewardSpec("reasoning-gym", options=tag),),
        stop=stop,
        max_tokens=max_tokens,
    )


class _Source:
    """Problems of one generated dataset, by index."""

    def __init__(self, options: Options, seed: int, size: int, split: str) -> None:
        self.options, self.seed, self.size, self.split = options, seed, size, split
        self.dataset = _dataset(options, seed, size)
        self.where = f"reasoning-gym {options.dataset!r}"

    def __getitem__(self, index: int) -> Problem:
        try:
            entry = self.dataset[index]
        except Exception as error:
            raise TrimtabError(f"{self.where}: cannot make problem {index}: {type(error).__name__}: {error}") from None
        name, answer = self.options.dataset, entry["answer"]
        return Problem(
            id=f"{name}-{self.split}-{index}",
            question=entry["question"],
            answer="" if answer is None else str(answer),
            extra={
                "dataset": name,
                "config": self.options.config,
                "seed": self.seed,
                "size": self.size,
                "index": index,
            },
        )


def _dataset(options: Options, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if options.dataset not in DATASETS:
        raise TrimtabError(f"reasoning-gym has no dataset {options.dataset!r}{did_you_mean(options.dataset, DATASETS)}")
    known = [name for name in DATASETS[options.dataset][1].__dataclass_fields__ if name not in ("seed", "size")]
    for word in options.config:
        if word not in known:
            raise TrimtabError(
                f"reasoning-gym {options.dataset!r}: no config option {word!r}{did_you_mean(word, known)}"
            )
    try:
        return reasoning_gym.create_dataset(options.dataset, seed=seed, size=size, **options.config)
    except Exception as error:  # each dataset checks its config in its own way, mostly with assertions
        raise TrimtabError(
            f"reasoning-gym {options.dataset!r}: config refused: {error or type(error).__name__}"
        ) from None


def _test_split(source: _Source, holdout: int) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for index in range(source.size):
        problem = source[index]
        problems.setdefault(problem.question, problem)
        if len(problems) == holdout:
            return list(problems.values())
    raise TrimtabError(
        f"{source.where}: only {len(problems)} different questions in {source.size} draws, holdout wants {holdout}; "
        "lower holdout or widen its config"
    )
