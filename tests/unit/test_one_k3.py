"""k3 has one definition: r - 1 - log r, bounded only where r would overflow, whoever computes it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.token_tables import table

from trimtab.corrections import Ratios, Sequences
from trimtab.corrections.divergences import k3, per_token
from trimtab.diagnosis import tokens
from trimtab.diagnosis.causes.detector import LogprobPairs
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.monitor.metrics_of_step import step_metrics
from trimtab.objectives import mismatch

ROOT = Path(__file__).parents[2]
TRAINER, SAMPLER = -25.5, -0.5  # log-ratio -25: 24 nats


def test_an_unlikely_token_has_the_same_k3_in_every_command() -> None:
    one = table([[TRAINER - SAMPLER]], behavior=SAMPLER)
    trained = TrainedTokens.of(one, 0)
    train, rollout, mask = torch.tensor([[TRAINER]]), torch.tensor([[SAMPLER]]), torch.tensor([[True]])
    ratios = Ratios(train - rollout, Sequences(mask))
    found = {
        "objective": float(per_token("k3", ratios, rollout)),
        "mismatch": mismatch(train, rollout, mask).finalize()["k3"],
        "monitor": step_metrics(train, rollout, mask).finalize()["mismatch/k3"],
        "preflight": float(tokens.k3(np.array([-25.0]))[0]),
        "diagnose": float(trained.k3[0]),
        "diagnose, causes": float(LogprobPairs.of(one).k3[0]),
    }
    assert found == pytest.approx(dict.fromkeys(found, 24.0), rel=1e-6)


def test_k3_never_overflows_and_is_never_negative() -> None:
    log = torch.tensor([0.0, 1e-9, -25.0, 25.0, 1e30, -1e30, torch.inf, -torch.inf], dtype=torch.float64)
    largest = np.exp(20) - 21
    expected = torch.tensor([0.0, 5e-19, 24.0, largest, largest, 1e30, largest, torch.inf], dtype=torch.float64)
    torch.testing.assert_close(k3(log), expected, rtol=1e-9, atol=1e-25)
    np.testing.assert_array_equal(tokens.k3(log.numpy()), k3(log).numpy())


def test_the_penalty_never_pushes_away_from_the_reference() -> None:
    """Its gradient by the log-prob of the current policy, at tokens that the reference finds e^25 times as likely."""
    current = torch.tensor([-30.0, -6.0], requires_grad=True)
    k3(torch.tensor([-5.0, -5.0]) - current).sum().backward()
    assert current.grad.tolist() == pytest.approx([0.0, 1 - np.e])


def test_nothing_computes_k3_beside_it() -> None:
    """No `expm1(x) - x` and no `exp(x) - 1 - x` elsewhere."""
    found = []
    for path in (file for folder in ("src", "benchmarks", "docs") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                x = ast.unparse(node.right)
                if ast.unparse(node.left).endswith(
                    (f"expm1({x})", f"{x}.expm1()", f"exp({x}) - 1", f"{x}.exp() - 1", "ratio - 1")
                ):
                    found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    assert found == []
