"""Relay sampling with scripted engines: which model samples which tokens, with which random numbers."""

import numpy as np
import pytest
from tests.support.characters import Characters, response_of
from tests.support.fake_engine import FakeEngine

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.evaluation import evaluate
from trimtab.trainer.evaluation.evaluator import Relay
from trimtab.types import SamplingParams

TASK = tasks.build("arithmetic", holdout=2)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=8, stop=TASK.stop)


class Recording(FakeEngine):
    """Notes the seed and the prefixes of every call, and what it answered."""

    def generate(self, prompts, samples, sampling, *, seed, prefixes=None):
        answers = super().generate(prompts, samples, sampling, seed=seed, prefixes=prefixes)
        self.seed, self.prefixes, self.answers = seed, prefixes, answers
        return answers


def engines(begins, completes):
    return [
        Recording({problem.id: [response_of(line) for line in lines] for problem in TASK.test})
        for lines in (begins, completes)
    ]


def relayed(begins, completes, ratio, samples=2):
    with rewards.build([], TASK) as scorer:
        return evaluate(
            completes, Characters(), TASK, scorer,
            problems=TASK.test, samples=samples, sampling=SAMPLING, seed=1, relay=Relay(begins, ratio),
        )  # fmt: skip


def test_the_first_half_is_the_relays_and_each_sample_has_its_own():
    begins, completes = engines(["abcdef", "uvwx"], ["ABCDEF", "UVWXYZ"])
    result = relayed(begins, completes, 0.5)
    spelled = [["".join(map(chr, answer.response_ids)) for answer in group] for group in completes.answers]
    assert spelled == [["abcDEF", "uvWXYZ"]] * 2
    assert (result.prefix, result.tokens) == ((3 + 2) / 2, 6)
    assert begins.prefixes is None
    seeds = [begins.seed, completes.seed]
    with rewards.build([], TASK) as scorer:
        evaluate(completes, Characters(), TASK, scorer, problems=TASK.test, samples=2, sampling=SAMPLING, seed=1)
    assert len({*seeds, completes.seed}) == 3, "neither model repeats the other's draws, or those alone"


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 0), (0.29, 1), (0.5, 2), (0.99, 4)])
def test_the_ratio_rounds_down_and_never_keeps_the_end(ratio, kept):
    begins, completes = engines(["abcde"], ["ABCDE"])
    relayed(begins, completes, ratio)
    assert {len(prefix.response_ids) for group in completes.prefixes for prefix in group} == {kept}
    assert np.array_equal(completes.prefixes[0][0].response_ids, np.frombuffer(b"abcde"[:kept], np.uint8))


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_ratios_that_leave_nothing_to_complete(ratio):
    with pytest.raises(TrimtabError, match="relay ratio"):
        Relay(FakeEngine({}), ratio)
