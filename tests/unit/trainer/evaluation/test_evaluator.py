"""Counts, failures and reports of an evaluation, with a scripted engine and a hand-made task."""

import subprocess
import sys
from dataclasses import replace

import pytest
from tests.support.characters import Characters, response_of
from tests.support.fake_engine import FakeEngine
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.evaluation import Settings, TaskSpec, compare, evaluate
from trimtab.types import EpisodeOutcome, RewardSpec, SamplingParams

TASK = tasks.build("arithmetic", holdout=3)
FOUR = SamplingParams(temperature=1.0, max_tokens=8, stop=TASK.stop)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, stop=TASK.stop)


def script(*wrong_ones):
    """Problem i gets 4 samples, of which the first `wrong_ones[i]` are wrong; its last right one is cut if i == 1."""
    lines = {}
    for index, (problem, wrong) in enumerate(zip(TASK.test, wrong_ones, strict=True)):
        right = [response_of(f" {problem.answer}")] * (4 - wrong)
        if index == 1:
            right[-1] = response_of(f" {problem.answer}", "length")
        lines[problem.id] = [response_of(" 7")] * wrong + right
    return FakeEngine(lines)


def measured(engine, specs=(), samples=4, sampling=FOUR, task=TASK, **more):
    options = {"problems": task.test, "samples": samples, "sampling": sampling, "seed": 3, **more}
    with rewards.build(specs, task) as scorer:
        return evaluate(engine, Characters(), task, scorer, **options)


def test_accuracy_pass_at_k_and_lengths_by_hand():
    result = measured(script(4, 1, 0))
    assert [(p.id, p.correct, p.scored) for p in result.problems] == [
        (problem.id, correct, 4) for problem, correct in zip(TASK.test, (0, 2, 4), strict=True)
    ]
    assert result.accuracy == pytest.approx((0 + 2 / 4 + 1) / 3)
    assert result.pass_ks == (1, 2, 4)
    assert [one.value for one in result.pass_estimates.values()] == pytest.approx([0.5, (5 / 6 + 1) / 3, 2 / 3])
    assert result.truncated == pytest.approx(1 / 12)
    assert result.errors == ()
    lengths = [len(f" {problem.answer}") for problem in TASK.test]
    assert result.tokens == pytest.approx((4 * 2 + 2 + 3 * lengths[1] + 4 * lengths[2]) / 12)


def test_lengths_count_sampled_tokens():
    class Conversations(FakeEngine):
        def generate(self, prompts, samples, sampling, *, seed, prefixes=None, turns=None, abort=None):  # noqa: ARG002
            return [[multi_turn(0, "a..b").completion] * samples for _ in prompts]

    assert measured(Conversations({})).tokens == 2


class Episodes(FakeEngine):
    """Each problem has four episodes: one of two calls raises; a void one; no call; one whose environment fails."""

    def __init__(self):
        super().__init__({})

    def generate(self, prompts, samples, sampling, *, seed, prefixes=None):  # noqa: ARG002
        outcomes = [
            EpisodeOutcome(None, calls=2, tool_errors=1, reward=1.0, tool_error="KeyError: 'x'"),
            EpisodeOutcome(None, calls=1, void=True, reward=0.0),
            EpisodeOutcome(None, reward=0.0),
            EpisodeOutcome(None, calls=1, tool_errors=1, failure="a tool did not return"),
        ]
        return [[replace(response_of(" 7"), outcome=one) for one in outcomes[:samples]] for _ in prompts]


def test_calls_tool_errors_void_and_failed_episodes_are_counted():
    result = measured(Episodes())
    assert result.as_dict()["episodes"] == {"calls": 1.0, "tool_errors": 0.5, "void": 0.25, "failed": 3}
    assert (result.accuracy, len(result.errors)) == (pytest.approx(1 / 3), 3)


def test_episodes_without_a_call_have_no_tool_errors_and_no_environment_has_no_episodes():
    assert EpisodeCounts.of([EpisodeOutcome(None)]).as_dict() == {"calls": 0, "tool_errors": 0, "void": 0, "failed": 0}
    assert measured(script(4, 1, 0)).as_dict()["episodes"] is None


def test_the_first_reward_alone_decides_what_is_correct():
    specs = [RewardSpec("exact"), RewardSpec("overlong", options={"max_tokens": 4, "cache": 4})]
    result = measured(script(4, 1, 0), specs)
    assert result.accuracy == pytest.approx(0.5)
    assert result.reward < 0.5


def test_failures_are_counted_and_are_in_no_average():
    def picky(completion, problem):
        if completion == " 7" and problem.id == TASK.test[1].id:
            raise ValueError("cannot judge this")
        return float(completion.strip() == problem.answer)

    result = measured(script(2, 1, 0), [RewardSpec(picky)])
    assert [(p.correct, p.scored) for p in result.problems] == [(2, 4), (3, 3), (4, 4)]
    [error] = result.errors
    assert "reward 'picky' raised ValueError: cannot judge this" in error
    assert result.pass_ks == (1, 2)
    with pytest.raises(TrimtabError, match=r"not one sample could be scored.*cannot judge"):
        measured(script(4, 3, 4), [RewardSpec(always)])


def always(completion, problem):  # noqa: ARG001
    raise ValueError("cannot judge")


class Listing(FakeEngine):
    """Remembers the seed, the problems and the number of responses of every call."""

    def __init__(self, script):
        super().__init__(script)
        self.asked, self.calls = [], []

    def generate(self, prompts, samples, sampling, *, seed, prefixes=None):
        self.asked.append([prompt.problem.id for prompt in prompts])
        self.calls.append((seed, len(prompts) * samples))
        return super().generate(prompts, samples, sampling, seed=seed, prefixes=prefixes)


@pytest.mark.parametrize(
    ("holdout", "sampling", "samples", "responses"),
    # 512 samples x 128 problems at once would hold 65,536 responses.
    [(130, GREEDY, 1, [64, 64, 2]), (5, FOUR, 512, [1024, 1024, 512])],
)
def test_calls_are_small_and_have_seeds_of_their_own(holdout, sampling, samples, responses):
    task = tasks.build("arithmetic", holdout=holdout)
    engine = Listing({problem.id: [response_of(" 7")] for problem in task.test})
    steps = []
    progress = lambda done, count: steps.append((done, count))  # noqa: E731
    result = measured(engine, samples=samples, sampling=sampling, task=task, progress=progress)
    seeds, sizes = zip(*engine.calls, strict=True)
    assert (list(sizes), len(set(seeds))) == (responses, 3)
    assert steps == [(sum(responses[:calls]) // samples, holdout) for calls in (1, 2, 3)]
    assert [problem.scored for problem in result.problems] == [samples] * holdout


def test_prompts_that_do_not_fit_are_not_sampled_and_count_as_wrong():
    """One in the first batch of 64 and the whole second batch; a token a byte."""
    task = tasks.build("arithmetic", holdout=70)
    long = [problem for index, problem in enumerate(task.test) if index in (1, 64, 65, 66, 67, 68, 69)]
    padded = [replace(problem, question=f"{'very ' * 20}{problem.question}") for problem in long]
    problems = [dict(zip([p.id for p in long], padded, strict=True)).get(p.id, p) for p in task.test]
    room = max(len(task.prompt_text(p, Characters())) for p in task.test)
    engine = Listing({problem.id: [response_of(f" {problem.answer}")] for problem in problems})
    result = measured(engine, samples=2, task=task, problems=problems, context=room + FOUR.max_tokens)
    assert engine.asked == [[p.id for p in problems[:64] if p not in padded]], "a batch of long ones asks nobody"
    assert [(p.id, p.correct, p.scored) for p in result.problems] == [
        (problem.id, 0 if problem in padded else 2, 2) for problem in problems
    ]
    assert (result.too_long, result.accuracy, result.truncated) == (7, pytest.approx(63 / 70), 0.0)
    assert result.as_dict()["too_long"] == 7


def test_prompts_may_be_as_long_as_the_context_less_the_response():
    [room] = {len(TASK.prompt_text(problem, None)) for problem in TASK.test}
    assert measured(script(0, 0, 0), context=room + 8).too_long == 0
    message = f"the shortest of 3 has {room} tokens, max_tokens is 8 and the model's context holds {room + 7};"
    with pytest.raises(TrimtabError, match=message):
        measured(script(0, 0, 0), context=room + 7)


def test_tasks_of_one_name_are_told_apart_by_their_options():
    specs = [TaskSpec("sort", {"digits": 4}), TaskSpec("sort"), TaskSpec("swap-sort", {"holdout": 9})]
    assert compare(["laboratory"], specs, Settings(problems=1)).tasks == ("sort (digits=4)", "sort", "swap-sort")


def test_no_problems_are_refused():
    with pytest.raises(TrimtabError, match="no problems to evaluate on"):
        measured(script(0, 0, 0), problems=[])


@pytest.mark.e2e
def test_importing_evaluation_loads_neither_torch_nor_the_trainer():
    loaded = "sorted(m for m in sys.modules if m in ('torch', 'trimtab.trainer.run'))"
    code = f"import sys, trimtab.trainer.evaluation; print({loaded})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
