"""How long prompts are and may be, on texts whose tokens are counted by hand: one character is one token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.config import load_config
from trimtab.trainer.held_out import HeldOut, build_held_out
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.rollout.prompts import PromptStream, smallest_context
from trimtab.trainer.tasks.task import BuiltTask, Plain
from trimtab.types import Problem, RewardSpec, SamplingParams

_, TOKENIZER = build(0)


def task(*lengths: int) -> BuiltTask:
    problems = [Problem(f"p{index}", "1" * length, "1.") for index, length in enumerate(lengths)]
    return BuiltTask("file", problems, problems, Plain(), (), (".",), 4)


def stream(*lengths: int, max_prompt: int | None = None, seed: int = 0) -> PromptStream:
    return PromptStream(task(*lengths), TOKENIZER, seed, max_prompt=max_prompt)


def collecting(max_tokens: int, context: int, source: PromptStream | None = None, **more: Any) -> Any:
    """What `HeldOut` reads of a collector."""
    sampling = SamplingParams(max_tokens=max_tokens, stop=(".",))
    names = {"stream": source or stream(9), "sampling": sampling, "context": context, **more}
    return SimpleNamespace(config=load_config({"eval": {"problems": 5}}), **names)


@pytest.mark.parametrize(
    ("given", "contexts", "expected"),
    [
        (None, (64, None), 64),
        (None, (64, 32), 32),
        (None, (None, None), None),
        (20, (64, None), 64),
        (54, (64, None), 64),
        (100, (None,), None),
    ],
)
def test_the_smallest_context_counts(given: int | None, contexts: tuple[int | None, ...], expected: int | None) -> None:
    config = load_config({"sampling": {} if given is None else {"max_prompt_tokens": given}})
    assert smallest_context(config, SamplingParams(max_tokens=10), contexts) == expected


@pytest.mark.parametrize(
    ("given", "most", "named"),
    [(55, 10, "max_prompt_tokens = 55 and max_tokens = 10 .* 64 tokens"), (None, 64, "max_tokens = 64 leaves no room")],
)
def test_what_no_context_can_hold_is_refused(given: int | None, most: int, named: str) -> None:
    config = load_config({"sampling": {} if given is None else {"max_prompt_tokens": given}})
    with pytest.raises(TrimtabError, match=named):
        smallest_context(config, SamplingParams(max_tokens=most), (64,))


def test_prompts_that_are_too_long_are_replaced() -> None:
    lengths = [3, 30, 4, 5, 31, 6]
    plain, limited = stream(*lengths).at(0, 60), stream(*lengths, max_prompt=6)
    drawn = limited.at(0, 60)
    assert limited.newly_replaced() == 20, "two of six problems, in each of ten epochs"
    assert max(len(prompt.ids) for prompt in drawn) == 6
    kept = [a.problem.id == b.problem.id for a, b in zip(plain, drawn, strict=True) if len(a.ids) <= 6]
    assert kept == [True] * 40, "the order of all others is as it was"
    # A resumed run asks from the middle on.
    again = stream(*lengths, max_prompt=6).at(17, 20)
    assert [prompt.problem.id for prompt in again] == [prompt.problem.id for prompt in drawn[17:37]]


def test_a_search_that_finds_nothing_short_ends() -> None:
    with pytest.raises(TrimtabError, match="no training problem has a prompt of at most 2 tokens"):
        stream(3, 3, max_prompt=2).at(0, 1)


def test_the_only_short_prompt_of_many_is_found() -> None:
    """1,000 draws with replacement missed one of 2,000 in 6 of 10 positions."""
    drawn = stream(*[9] * 1999, 3, max_prompt=4).at(0, 4)
    assert {prompt.problem.id for prompt in drawn} == {"p1999"}


def test_held_out_problems_that_do_not_fit_the_context_count_as_not_solved() -> None:
    """Two of five do not fit; the engine answers the others, one of them right.

    What training may ask (`max_prompt`) does not matter: `trimtab eval` must give the same number.
    """
    source = stream(3, 30, 4, 31, 5, max_prompt=3)
    engine = FakeEngine({"p0": ["1."], "p2": ["2."], "p4": ["2."]}, tokenizer=TOKENIZER)
    with rewards.build([RewardSpec("exact")], source.task) as scorer:
        collector = collecting(4, 10, source=source, scorer=scorer, episodes=None)
        held_out = HeldOut(source.task, scorer, source.task.test[:5], samples=0).without_long(collector)
        measured = held_out.measure(engine, collector)
        assert measured == {"eval/file/greedy": pytest.approx(1 / 5), "eval/file/problems": 5}
    assert [problem.id for problem in held_out.problems] == ["p0", "p2", "p4"]
    assert held_out.lines() == [
        "2 of 5 held-out problems of file do not fit the context with their response: they count as not solved"
    ]


def test_skipped_problems_are_not_evaluated_and_enough_must_be_left() -> None:
    collector = SimpleNamespace(stream=stream(9), context=None)
    test = task(3, 3, 3, 3, 3)
    for skip, problems, ids in ((0, 2, ["p0", "p1"]), (2, 2, ["p2", "p3"]), (4, 1, ["p4"])):
        config = load_config({"eval": {"skip": skip, "problems": problems}})
        [evaluated] = build_held_out(config, test, None, [])  # pyright: ignore[reportArgumentType]
        held_out = evaluated.without_long(collector)  # pyright: ignore[reportArgumentType]
        assert [problem.id for problem in held_out.problems] == ids


def test_held_out_problems_that_are_all_too_long_are_not_solved() -> None:
    collector: Any = collecting(4, 10)
    held_out = HeldOut(collector.stream.task, None, collector.stream.task.test[:5], samples=0).without_long(collector)
    assert held_out.measure(None, collector) == {"eval/file/greedy": 0.0, "eval/file/problems": 1}


@pytest.mark.parametrize(("of_run", "of_task", "fitting"), [(55, 4, ["p0", "p2", "p4"]), (4, 59, ["p0", "p4"])])
def test_problems_of_another_task_have_the_length_of_its_responses(
    of_run: int, of_task: int, fitting: list[str]
) -> None:
    """In a context of 64, responses of 4 tokens leave 60 for a prompt and those of 59 leave 5."""
    other = replace(task(3, 61, 60, 62, 5), name="other", max_tokens=of_task)
    held_out = HeldOut(other, None, other.test[:5], samples=0).without_long(collecting(of_run, 64))
    assert [problem.id for problem in held_out.problems] == fitting
