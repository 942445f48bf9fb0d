"""Responses of several model turns: observations count nowhere, and the levels of turns by hand.

F is one response of three trained tokens, with the probabilities of sampler, proximal and current policy below.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import Band, Clipped, Objective, PolicyLogps, Ratio, Regression, Weight, correct, objective
from trimtab.objectives.calibrate import Observed, calibrated

NAN = float("nan")
BEHAVIOR = (0.50, 0.20, 0.80)
PROXIMAL = (0.55, 0.18, 0.80)
CURRENT = (0.75, 0.10, 0.84)
# F with an observation of two tokens after its second token.
MASK = [[True, True, False, False, True]]
TURN = [[0, 0, 0, 0, 1]]


def row(values: tuple[float, ...], junk: float = NAN) -> Tensor:
    """Log-probs of F, `junk` at the observation."""
    one, two, three = (math.log(value) for value in values)
    return torch.tensor([[one, two, junk, junk, three]], dtype=torch.float64)


def fixture(current: Tensor | None = None, **changes: Any) -> PolicyLogps:
    fields: dict[str, Any] = {
        "current": row(CURRENT) if current is None else current,
        "behavior": row(BEHAVIOR),
        "mask": torch.tensor(MASK),
        "proximal": row(PROXIMAL),
        "reference": row(PROXIMAL),
        "entropy": torch.tensor([[1.0, 2.0, NAN, NAN, 0.3]], dtype=torch.float64),
        "turn": torch.tensor(TURN),
    }
    return PolicyLogps(**(fields | changes))


def per_token(obj: Objective, advantage: float = 1.0, **changes: Any) -> tuple[float, list[float]]:
    """The loss of F times its three tokens, and the gradient by the log-prob of each of the five tokens."""
    current = row(CURRENT).requires_grad_()
    loss = obj(fixture(current, **changes), torch.tensor([[advantage]], dtype=torch.float64)).loss
    loss.backward()
    return 3 * loss.item(), (3 * current.grad[0]).tolist()


def turn_level(level: str, epsilon: float = 0.2) -> Objective:
    return Objective("turn", Ratio(level), Clipped(epsilon, epsilon))


def test_the_level_of_turns_by_hand() -> None:
    loss, grad = per_token(turn_level("turn_geometric"))
    assert grad == pytest.approx([-0.870388, -0.870388, 0, 0, -1.05], abs=1e-6)
    assert loss == pytest.approx(-2 * 0.870388 - 1.05, abs=1e-6)
    loss, grad = per_token(turn_level("turn"))
    assert grad == pytest.approx([-0.757576, -0.757576, 0, 0, -1.05], abs=1e-6)
    assert loss == pytest.approx(-2 * 0.757576 - 1.05, abs=1e-6)
    # A turn is clipped as a whole: its geometric ratio 0.87 is below 0.9, that of the second turn is not.
    _, grad = per_token(turn_level("turn_geometric", 0.1), advantage=-1.0)
    assert grad == pytest.approx([0, 0, 0, 0, 1.05], abs=1e-6)


def test_weights_and_masks_of_turns_by_hand() -> None:
    logps, mask, turn = fixture(), torch.tensor(MASK), torch.tensor(TURN)
    expected = {"turn_geometric": (0.99**0.5, 1.0), "turn": (0.99, 1.0)}  # rho 1.1 * 0.9, and 1
    for level, (first, second) in expected.items():
        correction = correct(logps.proximal, logps.behavior, mask, weight=Weight(level, max=2.0), turn=turn)
        assert correction.weight[0].tolist() == pytest.approx([first, first, 0, 0, second], abs=1e-12)
        assert correction.metrics.finalize()["weight/mean"] == pytest.approx((first + second) / 2)
        band = correct(logps.proximal, logps.behavior, mask, masks=[Band(level, 0.995, 1.2)], turn=turn)
        inside = first >= 0.995
        assert band.keep[0].tolist() == [inside, inside, False, False, True]
        assert band.metrics.finalize()[f"reject/band_{level}"] == pytest.approx(0 if inside else 2 / 3)
        masked = correct(logps.proximal, logps.behavior, mask, weight=Weight(level, "mask", 0.995, 2.0), turn=turn)
        assert masked.keep[0].tolist() == [inside, inside, False, False, True]
    loss, grad = per_token(objective("turn-tis", clip_low=1.0, clip_high=9.0))
    assert grad == pytest.approx([-0.99 * 0.75 / 0.55, -0.99 * 0.1 / 0.18, 0, 0, -1.05], abs=1e-9)
    assert loss == pytest.approx(sum(grad), abs=1e-9)


def test_normalized_weights_of_turns_have_mean_one_over_turns() -> None:
    _, grad = per_token(objective("turn-tis", normalize=True, clip_low=1.0, clip_high=9.0))
    mean = (0.99 + 1.0) / 2
    assert grad[4] == pytest.approx(-1.05 / mean)


@pytest.mark.parametrize(("level", "whole"), [("turn_geometric", "geometric"), ("turn", "sequence")])
def test_one_turn_is_a_response_and_one_token_a_turn_is_a_token(level: str, whole: str) -> None:
    for part in (lambda name: turn_level(name, 0.1), _weighted, _banded):
        one = torch.zeros(1, 5, dtype=torch.long)
        assert per_token(part(level), turn=one)[1] == pytest.approx(per_token(part(whole))[1], abs=1e-12)
        each = torch.arange(5)[None]
        assert per_token(part(level), turn=each)[1] == pytest.approx(per_token(part("token"))[1], abs=1e-12)


def _weighted(level: str) -> Objective:
    return Objective("weighted", Ratio(), Clipped(), Weight(level, "clip", 0.95, 1.05))


def _banded(level: str) -> Objective:
    return Objective("banded", Ratio(), Clipped(), masks=(Band(level, 0.95, 1.05),))


def test_equal_numbers_in_two_responses_are_two_turns() -> None:
    mask = torch.tensor([[True, True], [True, True]])
    behavior, zero = torch.full((2, 2), -1.0), torch.zeros(2, 2, dtype=torch.long)
    proximal = behavior + torch.tensor([[0.1, 0.3], [0.5, -0.1]])
    weight = Weight("turn", max=9.0)
    rows = correct(proximal, behavior, mask, weight=weight, turn=zero).weight
    assert_close(rows.log(), torch.tensor([[0.4, 0.4], [0.4, 0.4]]))
    ids, turn = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[5, 0], [0, 5]])
    crossed = correct(proximal, behavior, mask, weight=weight, sequence_ids=ids, turn=turn).weight
    assert_close(crossed.log(), torch.tensor([[0.0, 0.8], [0.8, 0.0]]))


def test_a_level_of_turns_without_turns_is_refused() -> None:
    for obj in (objective("turn-tis"), turn_level("turn_geometric"), _banded("turn_geometric")):
        with pytest.raises(ValueError, match="needs turn, which is None") as error:
            obj(fixture(turn=None), torch.ones(1, 1, dtype=torch.float64))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="give the number of the model turn of each token"):
        correct(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2).bool(), weight=Weight("turn"))
    with pytest.raises(TrimtabError, match=r'not Ratio."turn", "behavior"'):
        Objective("oapl", Ratio("turn", "behavior"), Regression())


def test_calibration_reads_trained_tokens_and_turns() -> None:
    result = Observed.of(row(PROXIMAL), row(BEHAVIOR), torch.tensor(MASK), turn=torch.tensor(TURN))
    assert result.sequence.tolist() == pytest.approx([math.log(0.99)])
    assert result.geometric.tolist() == pytest.approx([math.log(0.99) / 3])
    assert result.k3.tolist() == pytest.approx([0.00335011], abs=1e-8)
    assert result.turn.tolist() == pytest.approx([math.log(0.99), 0.0], abs=1e-12)
    with pytest.raises(TrimtabError, match="2 turns are too few for weight_max"):
        calibrated("turn-tis", result)
    with pytest.raises(TrimtabError, match="a bound on turns, which are not known here"):
        calibrated("turn-tis", Observed.of(row(PROXIMAL), row(BEHAVIOR), torch.tensor(MASK)))
