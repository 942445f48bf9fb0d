"""Signs are what was planted; candidates are ranked by them, by the side that is off, and by what was tested."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support import planted_causes as plant

import trimtab.diagnosis
from trimtab.diagnosis.causes import find_candidates, find_causes
from trimtab.diagnosis.causes.candidates import KINDS, find_signs, group_by_test, rank
from trimtab.diagnosis.causes.detector import LogprobPairs
from trimtab.diagnosis.measure.placeholders import PlaceholderSums
from trimtab.diagnosis.records import Candidate, Numerics, Stated
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

RESPONSES, LENGTH, VOCABULARY = 120, 40, 60


class Drawn:
    """Responses drawn from random distributions, and what other logits give their tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        count = RESPONSES * LENGTH
        self.logits = self.random.normal(size=(count, VOCABULARY)) * self.random.lognormal(1.0, 0.4, (count, 1))
        self.row = np.repeat(np.arange(RESPONSES), LENGTH)
        self.position = np.tile(np.arange(LENGTH), RESPONSES)
        self.behavior = self._normalized(self.logits)
        self.ids = (np.exp(self.behavior).cumsum(1) > self.random.random((count, 1))).argmax(1)

    @staticmethod
    def _normalized(logits: np.ndarray) -> np.ndarray:
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def noise(self, size: np.ndarray | float) -> np.ndarray:
        return np.broadcast_to(np.asarray(size), (len(self.row),))[:, None] * self.random.normal(size=self.logits.shape)

    def table(
        self, trainer_logits: np.ndarray, extra_mass: np.ndarray | float = 0.0, **columns: np.ndarray
    ) -> TokenTable:
        """extra_mass: exp of the logits of ids that only the trainer has."""
        total = np.log(np.exp(trainer_logits).sum(1) + extra_mass)
        at = np.arange(len(self.ids)), self.ids
        return TokenTable(
            starts=np.arange(RESPONSES + 1) * LENGTH,
            mask=np.ones(len(self.ids), dtype=bool),
            behavior=self.behavior[at].astype(np.float32),
            proximal=(trainer_logits[at] - total).astype(np.float32),
            ids=self.ids,
            **columns,
        )


def signs(table: TokenTable) -> set[str]:
    return set(find_signs(LogprobPairs.of(table)))


def test_noise_of_one_size_has_no_sign_of_a_fault_and_few_tokens_have_none() -> None:
    data = Drawn()
    table = data.table(data.logits + data.noise(0.05))
    assert signs(table.select(np.arange(RESPONSES) < 0)) == set()
    found = signs(table)
    assert found == {"mean-one", "size-small", "no-direction", "not-by-id", "even", "flat"}


def test_a_vocabulary_that_only_the_trainer_has_lowers_every_token() -> None:
    data = Drawn()
    mass = np.exp(data.logits).sum(1) * data.random.lognormal(-5, 1.5, len(data.row))
    found = signs(data.table(data.logits + data.noise(0.01), mass))
    assert {"mean-low", "one-way", "tail-one-sided"} <= found
    assert rank(find_signs(LogprobPairs.of(data.table(data.logits + data.noise(0.01), mass))))[0].name == "last-layer"


def test_a_temperature_moves_logits_along_a_line_and_so_does_a_bend() -> None:
    data = Drawn()
    assert "straight" in signs(data.table(data.logits / 1.4))
    bent = data.logits - 0.05 * np.maximum(data.logits, 0) ** 2
    assert "straight" in signs(data.table(bent))


def test_a_penalty_on_tokens_that_occurred_before_is_seen() -> None:
    data = Drawn()
    seen = np.zeros(data.logits.shape, dtype=bool)
    for row in range(RESPONSES):
        for at in range(row * LENGTH + 1, (row + 1) * LENGTH):
            seen[at] = seen[at - 1]
            seen[at, data.ids[at - 1]] = True
    table = data.table(data.logits + 1.0 * seen)
    assert "seen" in signs(table)
    assert find_candidates(plant.measured(table), find_causes(plant.measured(table)), {})[0].name == "settings"


def test_responses_that_carry_a_difference_are_counted() -> None:
    data = Drawn()
    carries = data.row % 4 == 0
    table = data.table(data.logits + data.noise(np.where(carries, 1.5, 0.02)))
    found = find_signs(LogprobPairs.of(table))
    assert found["some-clean"].startswith("30 of 120 responses carry it")
    assert rank(found)[0].name == "batch-layout"


def test_lists_without_relation_belong_to_other_tokens_and_another_context_leaves_one() -> None:
    data = Drawn()
    assert "no-relation" not in signs(data.table(data.logits + data.noise(2.0)))
    table = data.table(data.logits + data.noise(0.02))
    moved = table.trainer.reshape(RESPONSES, LENGTH).copy()
    moved[::6] = np.random.default_rng(1).permutation(moved[::6], axis=1)
    table = replace(table, proximal=moved.reshape(-1))
    found = find_signs(LogprobPairs.of(table))
    assert found["no-relation"].startswith("in 20 of 120 responses")
    assert rank(found)[0].name == "pairs"
    causes = find_causes(plant.measured(table))
    assert [one.name for one in causes] == ["unexplained"]  # other experts would answer in every response
    assert find_candidates(plant.measured(table), causes, {})[0].name == "pairs"


def test_a_difference_that_begins_with_a_turn_is_one_of_context() -> None:
    data = Drawn()
    turn = (data.position >= 25).astype(np.int64)
    found = find_signs(LogprobPairs.of(data.table(data.logits + data.noise(np.where(turn, 0.8, 0.02)), turn=turn)))
    assert re.match(r"it is \d+ times as large in turn 2 as in the turn before", found["from-turn"])
    assert rank(found)[0].name == "prompt"
    deeper = data.noise(np.tile(np.linspace(0.02, 0.2, LENGTH), RESPONSES))
    assert "from-turn" not in signs(data.table(data.logits + deeper, turn=turn))


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (np.linspace(0.2, 1, LENGTH), "deeper"),
        (np.linspace(0.02, 1, LENGTH), "onset"),
        (np.linspace(1, 0.02, LENGTH), "earlier"),
    ],
)
def test_where_in_a_response_it_is_larger(size: np.ndarray, name: str) -> None:
    data = Drawn()
    assert name in signs(data.table(data.logits + data.noise(np.tile(size, RESPONSES))))


def test_what_begins_at_one_depth_in_all_responses_is_the_models_configuration() -> None:
    data = Drawn()
    found = find_signs(LogprobPairs.of(data.table(data.logits + data.noise(np.where(data.position < 25, 0.02, 0.8)))))
    assert "25 tokens" in found["one-depth"]
    assert rank(found)[0].name == "model-config"
    begin = data.random.integers(LENGTH, size=RESPONSES)[data.row]
    assert "one-depth" not in signs(data.table(data.logits + data.noise(np.where(data.position < begin, 0.02, 0.8))))


def test_a_low_mean_of_ratios_tells_nothing_where_far_tokens_go_both_ways() -> None:
    table = (data := Drawn()).table(data.logits + data.noise(0.02))
    moved = table.trainer.copy()
    moved[::4] -= 5.0
    assert "mean-low" in signs(replace(table, proximal=moved))
    moved[2::40] = np.minimum(moved[2::40] + 1.2, -1e-3)
    assert not {"mean-low", "mean-one"} & signs(replace(table, proximal=moved))


def test_another_temperature_of_some_requests_is_a_setting() -> None:
    data = Drawn()
    table = data.table(np.where(data.row[:, None] % 5 == 0, data.logits / 1.4, data.logits) + data.noise(0.01))
    assert {"straight", "some-clean"} <= signs(table)
    assert "settings" in {
        one.name for family in group_by_test(rank(find_signs(LogprobPairs.of(table))))[:3] for one in family
    }


def test_what_depends_on_the_id_and_grows_over_the_steps_is_weights() -> None:
    data = Drawn()
    step = np.arange(RESPONSES) // 20
    offset = data.random.normal(size=VOCABULARY)[None] * (0.15 * step[data.row])[:, None]
    table = data.table(data.logits + offset + data.noise(0.01), step=step)
    found = find_signs(LogprobPairs.of(table))
    assert {"by-id", "step-growth"} <= set(found)
    assert rank(found)[0].name == "weights"


def test_settings_that_the_file_states() -> None:
    data = Drawn()
    plain = {"temperature": np.ones(RESPONSES), "top_p": np.ones(RESPONSES), "top_k": np.full(RESPONSES, -1)}
    neutral = signs(data.table(data.logits / 1.4, **plain))
    stated = signs(data.table(data.logits / 1.4, **plain | {"temperature": np.full(RESPONSES, 0.7)}))
    assert "settings-neutral" in neutral
    assert "settings-stated" in stated


SHOWN = {"by-id": "the token id decides 20%", "size-coarse": "logits differ by 0.5"}


def test_what_was_tested_and_the_side_that_is_off_decide() -> None:
    assert rank(SHOWN)[0].name == "quantized"
    assert "quantized" not in [one.name for one in rank(SHOWN, tested={"quantized": False})]
    assert rank(SHOWN, tested={"randomness": True})[0].name == "randomness"
    assert "settings" not in {one.name for one in rank(SHOWN, side="trainer")}
    assert "randomness" not in {one.name for one in rank(SHOWN, side="sampler")}
    assert rank({}) == ()


def test_candidates_of_one_test_are_a_family_and_that_with_most_odds_comes_first() -> None:
    one, two, three = (Candidate(*"abcd", test, "", odds) for test, odds in (("x", 3.0), ("y", 2.0), ("y", 1.5)))
    assert group_by_test([one, two, three]) == [[two, three], [one]]
    assert group_by_test([one, two]) == [[one], [two]]
    assert group_by_test([replace(two, found=True), one]) == [[replace(two, found=True)], [one]]
    assert group_by_test([]) == []
    assert {one.name for one in group_by_test(rank(SHOWN))[0]} == {"quantized", "model-config"}


def test_a_candidate_says_what_speaks_for_and_against_it() -> None:
    first = rank(SHOWN | {"advantage": "log-ratios follow the advantage"})
    by_name = {one.name: one for one in first}
    assert by_name["weights"].speaks_for == "log-ratios follow the advantage"
    assert by_name["rounding"].speaks_against in ("logits differ by 0.5", "the token id decides 20%")
    assert by_name["routing"].speaks_for == ""


def test_the_table_and_the_signs_name_each_other() -> None:
    source = (Path(trimtab.diagnosis.__file__).parent / "causes" / "candidates.py").read_text()
    made = set(
        re.findall(
            r'"([a-z0-9]+(?:-[a-z0-9]+)+|straight|loose|onset|ends|seen|even|flat|deeper|earlier|advantage)"', source
        )
    )
    read = {name for kind in KINDS for name in (*kind.speaks_for, *kind.speaks_against)}
    assert read <= made
    assert all(set(kind.sides) <= {"sampler", "trainer", "both"} and math.isfinite(kind.prior) for kind in KINDS)


def test_a_proven_cause_leaves_no_candidates() -> None:
    data = Drawn()
    table = data.table(data.logits + data.noise(0.02))
    doubled = plant.measured(replace(table, proximal=table.proximal / math.log(2)))
    causes = find_causes(doubled)
    assert causes[0].name == "log-base"
    assert find_candidates(doubled, causes, {}) == ()


@pytest.mark.parametrize(("place", "word"), [(0, "first"), (LENGTH - 1, "last")])
def test_a_difference_at_the_ends_of_responses(place: int, word: str) -> None:
    data = Drawn()
    table = data.table(data.logits + data.noise(0.02))
    proximal = table.proximal.copy()
    proximal[place::LENGTH] -= 3.0
    found = find_signs(LogprobPairs.of(replace(table, proximal=proximal)))
    assert found["ends"].startswith(f"the {word} token of a response holds")
    assert rank(found)[0].name == "ends"


def test_values_that_are_clamped_are_no_placeholders() -> None:
    data = Drawn()
    table = data.table(data.logits + data.noise(0.02))
    sums = PlaceholderSums()
    sums.add(replace(table, proximal=np.maximum(table.proximal, -2)))
    assert sums.found() == ()
    (finding,) = sums.findings()
    assert (finding.name, finding.status) == ("clamped", "fail")
    assert PlaceholderSums().findings() == ()


def test_an_age_of_all_tokens_proves_nothing() -> None:
    data = Drawn()
    aged = {"version": np.zeros(len(data.ids), dtype=int), "proximal_version": np.ones(RESPONSES, dtype=int)}
    causes = find_causes(plant.measured(data.table(data.logits + data.noise(0.45), **aged)))
    assert causes[0].name == "stale"
    assert not causes[0].is_proven


@pytest.mark.parametrize(
    ("stated", "size", "proven"),
    [("bfloat16", 0.03, True), ("bfloat16", 0.4, False), ("int8", 0.3, True), ("fp8", 0.9, False)],
)
def test_what_a_user_states_must_be_of_that_size(stated: str, size: float, proven: bool) -> None:
    data = Drawn()
    whole = plant.measured(data.table(data.logits + data.noise(size)))
    numerics = Stated(stated).numerics
    found = find_causes(replace(whole, origin=replace(whole.origin, numerics=numerics)))
    assert found[0].is_proven == proven, found


def test_bits_and_names_that_a_user_states() -> None:
    coarse = {"fp8": "eight bits", "int8": "eight bits", "awq": "four bits", "nvfp4": "four bits"}
    assert {name: Stated(name).numerics.bits for name in coarse} == coarse
    recipe = Numerics("bfloat16", "float32", "none", ("vllm.kv_cache_dtype = fp8_e4m3",))
    assert recipe.bits == "eight bits"
    assert recipe.is_recorded
    assert not Stated("fp8").numerics.is_recorded
    for wrong in (partial(Stated, "fp9"), partial(Stated, lag=-1)):
        with pytest.raises(TrimtabError):
            wrong()
