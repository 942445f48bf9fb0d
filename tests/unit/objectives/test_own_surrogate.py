"""A surrogate of one's own that returns something else than a value for each token and metrics: one line says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from trimtab.corrections.statistics import Mean
from trimtab.errors import TrimtabError
from trimtab.objectives import Band, Evidence, Objective, PolicyLogps, Ratio, State, Surrogate, Terms, objective

Returned = Callable[[Terms], Any]


@dataclass(frozen=True)
class Own(Surrogate):
    returned: Returned

    def __call__(self, terms: Terms, state: State) -> Any:  # noqa: ARG002
        return self.returned(terms)

    def equation(self, ratio: str) -> str:
        return ratio


@dataclass(frozen=True)
class OwnMask(Band):
    kind: torch.dtype | None = torch.float32

    def keep(self, evidence: Evidence) -> Any:
        kept = super().keep(evidence)
        return kept.tolist() if self.kind is None else kept.to(self.kind)


LOGPS = PolicyLogps(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (lambda terms: terms.ratio, "Own returned Tensor, expected two: the value, and metrics or {}"),
        (lambda terms: (terms.ratio.mean(), {}), "Own returned torch.float32 (), expected a number for each token: "),
        (lambda terms: (terms.ratio[:, :1], {}), "floats (2, 3)"),
        (lambda terms: (terms.ratio > 1, {}), "Own returned torch.bool (2, 3), expected a number"),
        (lambda _: (1.0, {}), "Own returned float, expected a number for each token: floats (2, 3)"),
        (lambda terms: (terms.ratio, None), "expected two"),
        (lambda terms: (terms.ratio, {"own": terms.ratio.mean()}), "Own: metric 'own' is Tensor, expected one of"),
        (
            lambda terms: (terms.ratio, terms.share("own", terms.ratio)),
            "metric 'own': the share of tokens needs a mask",
        ),
        (lambda terms: (terms.ratio, terms.share_by_tenth("own", terms.ratio)), "not torch.float32"),
    ],
)
def test_a_surrogate_that_returns_something_else_is_named(returned: Returned, line: str) -> None:
    own = Objective("own", Ratio("token", "behavior"), Own(returned))
    with pytest.raises(TrimtabError, match=r"^(Own|metric)") as error:
        own(LOGPS, torch.ones(2, 1))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_surrogate_that_returns_a_detached_value_is_named() -> None:
    own = Objective("own", Ratio("token", "behavior"), Own(lambda terms: (terms.ratio.detach() * terms.advantage, {})))
    learned = replace(LOGPS, current=torch.zeros(2, 3, requires_grad=True))
    line = "^Own returned a value without gradient, which trains nothing: do not detach it$"
    with pytest.raises(TrimtabError, match=line):
        own(learned, torch.ones(2, 1))
    with torch.no_grad():  # an evaluation needs none
        assert own(learned, torch.ones(2, 1)).loss.item() == -1
    assert own(LOGPS, torch.ones(2, 1)).loss.item() == -1


def test_metrics_of_another_kind_may_be_given() -> None:
    own = Objective(
        "own", Ratio("token", "behavior"), Own(lambda terms: (terms.ratio, {"own": Mean.of(terms.ratio, terms.mask)}))
    )
    assert own(LOGPS, torch.ones(2, 1)).metrics.finalize()["own"] == 1.0


@pytest.mark.parametrize(("kind", "what"), [(torch.float32, "torch.float32"), (None, "list")])
def test_a_mask_that_keeps_no_bools_is_named(kind: torch.dtype | None, what: str) -> None:
    own = objective("grpo", mask=[OwnMask("token", 0.5, 2.0, kind=kind)])
    with pytest.raises(TrimtabError, match=f"OwnMask.keep returned {what}, expected bools: True at tokens it keeps"):
        own(LOGPS, torch.ones(2, 1))
