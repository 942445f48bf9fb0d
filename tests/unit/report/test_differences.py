"""Differing keys and aligned equations."""

from __future__ import annotations

from pathlib import Path

from trimtab.objectives import objective, objectives
from trimtab.report.differences import EquationPart, align, differing_keys
from trimtab.report.groups import Group
from trimtab.runs.reader import Run


def group(name: str, **config: object) -> Group:
    flat = {key.replace("__", "."): value for key, value in config.items()}
    return Group(name, [Run(Path(name), {}, [{"step": 1}])], flat)


def by_symbol(parts: list[EquationPart]) -> dict[str, EquationPart]:
    return {part.symbol: part for part in parts}


def marked(part: EquationPart, name: str) -> list[str]:
    [reading] = [reading for reading in part.readings if name in reading.names]
    return [text for text, own in reading.pieces if own]


def test_only_keys_that_differ_are_listed() -> None:
    first = group("a", optim__lr=1e-5, optim__warmup=0, objective__name="grpo")
    second = group("b", optim__lr=2e-5, optim__warmup=0, objective__name="oapl", objective__beta=0.1)
    assert differing_keys([first, second]) == {
        "optim.lr": [1e-5, 2e-5],
        "objective.name": ["grpo", "oapl"],
        "objective.beta": [None, 0.1],
    }
    assert differing_keys([first]) == {}
    assert differing_keys([first, first]) == {}


def test_differing_numbers_and_parts_are_marked() -> None:
    parts = by_symbol(align({name: objective(name).equation() for name in ("grpo", "dapo", "token-tis")}))
    assert list(parts) == ["loss", "r", "ρ", "D", "A"]
    loss = parts["loss"]
    assert [reading.names for reading in loss.readings] == [("grpo",), ("dapo",), ("token-tis",)]
    assert marked(loss, "grpo") == ["1.2"]
    assert marked(loss, "dapo") == ["1.28"]
    assert "sg[min(ρ_t, 2)]" in "".join(marked(loss, "token-tis"))
    [same] = parts["A"].readings
    assert same.names == ("grpo", "dapo", "token-tis")
    assert not any(own for _, own in same.pieces)
    assert parts["ρ"].without == ("grpo", "dapo")


def test_ratios_of_other_levels_and_policies_are_the_same_part() -> None:
    parts = by_symbol(
        align({name: objective(name).equation() for name in ("token-bypass", "seq-mis-seq-ratio", "gspo")})
    )
    assert len(parts["r"].readings) == 3
    assert marked(parts["r"], "token-bypass")[-1] == "μ"


def test_every_preset_keeps_its_equation_to_the_letter() -> None:
    equations = {name: objective(name).equation() for name in objectives()}
    parts = align(equations)
    for name, equation in equations.items():
        lines = {"".join(text for text, _ in r.pieces) for part in parts for r in part.readings if name in r.names}
        assert lines == {line.strip() for line in equation.splitlines()}
        for part in parts:
            has = [name in reading.names for reading in part.readings]
            assert sum(has) + (name in part.without) == 1


def test_two_masks_are_two_parts_and_a_strange_line_is_kept() -> None:
    parts = by_symbol(align({"a": "loss = 1\n  keep where x\n  keep where y\n", "b": "not known here: why"}))
    assert list(parts) == ["loss", "keep where", "keep where 2", ""]
    assert "".join(text for text, _ in parts[""].readings[0].pieces) == "not known here: why"
