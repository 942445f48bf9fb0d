"""What tuning trains, on which seeds and problems, and what it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.objectives import objectives
from trimtab.runs.summary import RunSummary
from trimtab.trainer.config import load_config
from trimtab.trainer.lab import tuning
from trimtab.trainer.lab.experiment import ExperimentPlan, parse_method, plan_experiment
from trimtab.trainer.lab.regimes import regime

OUT = Path("out")


def planned(methods: list[str], regimes: list[str], seeds: int = 2) -> ExperimentPlan:
    return plan_experiment(methods, [regime(name) for name in regimes], seeds, OUT)


def results(candidates: tuning.Candidates, accuracies: dict[str, list[float]]) -> dict[str, RunSummary]:
    """A summary of every run: accuracies by the end of the spec and by tuning seed, else .1."""
    found = {}
    for run in candidates.plan.runs:
        values = next((value for end, value in accuracies.items() if run.method.spec.endswith(end)), [0.1] * 9)
        found[run.name] = RunSummary("done", accuracy=values[run.seed - tuning.FIRST_SEED])
    return found


def test_every_method_has_as_many_settings_as_any_other_and_the_published_one_is_first() -> None:
    assert set(tuning.OTHER_BOUND) <= set(objectives())
    for name in [*objectives(), "icepop:weight_max=3", "tests.unit.objectives.own_rule:dppo"]:
        settings = tuning.candidates(parse_method(name), 1e-4)
        assert len({*settings}) == len(settings) == tuning.BUDGET == 6
        assert settings[0] == name


@pytest.mark.parametrize("name", sorted(tuning.OTHER_BOUND))
def test_the_other_bound_is_a_keyword_of_its_method_with_another_value(name: str) -> None:
    """A recipe refuses unknown keywords, and keywords without effect."""
    published, other = (
        load_config("laboratory", ['unset=["objective"]', f"objective.name={name}", *parse_method(spec).overrides])
        for spec in (name, f"{name}:{tuning.OTHER_BOUND[name]}")
    )
    from trimtab.objectives.lookup import from_section

    built = [from_section(config.objective.model_dump()) for config in (published, other)]
    assert (built[0], published.perturbation, published.prefix) != (built[1], other.perturbation, other.prefix)


def test_tuning_has_other_seeds_and_problems_than_the_comparison() -> None:
    comparison = planned(["grpo", "token-tis"], ["on-policy", "stale-32"], seeds=3)
    found = tuning.plan_tuning(comparison, 2)
    assert len(found.plan.runs) == 2 * 2 * 6 * 2
    assert {run.seed for run in found.plan.runs} == {1000, 1001}
    last = max(run.config.eval.skip + run.config.eval.problems for run in comparison.runs)
    assert min(run.config.eval.skip for run in found.plan.runs) >= last == 128
    assert all(str(run.config.out).startswith("out/tuning/") for run in found.plan.runs)
    assert found.specs["token-tis", "stale-32"] == (
        "token-tis",
        "token-tis:weight_max=5.0",
        "token-tis:optim.lr=2.5e-05",
        "token-tis:weight_max=5.0,optim.lr=2.5e-05",
        "token-tis:optim.lr=1.25e-05",
        "token-tis:weight_max=5.0,optim.lr=1.25e-05",
    )
    rates = [run.config.optim.lr for run in found.plan.runs if run.method.objective == "grpo" and run.seed == 1000]
    assert sorted(rates)[:6] == pytest.approx([1.25e-5, 2.5e-5, 2.5e-5, 3.5e-5, 5e-5, 5e-5])


def test_the_best_mean_is_chosen_and_of_equal_ones_the_published() -> None:
    comparison = planned(["grpo", "token-tis"], ["on-policy"])
    found = tuning.plan_tuning(comparison, 2)
    # Of token-tis one setting has the best run, another one the best mean.
    values = {"weight_max=5.0": [0.9, 0.2], "weight_max=5.0,optim.lr=5e-05": [0.7, 0.6], "token-tis": [0.5, 0.6]}
    values = dict(sorted(values.items(), key=lambda item: -len(item[0])))
    grpo, tis = tuning.choose(found, results(found, values))
    assert (grpo.spec, grpo.settings) == ("grpo", "published")
    assert (tis.spec, tis.settings) == ("token-tis:weight_max=5.0,optim.lr=5e-05", "weight_max=5.0 optim.lr=5e-05")
    assert (tis.accuracy, tis.published) == pytest.approx((0.65, 0.55))

    lines = tuning.describe([grpo, tis], found)
    assert "6 settings of each method" in lines[0]
    assert "seeds 1000 to 1001 and evaluated on held-out problems 129 to 256" in lines[0]
    assert lines[2] == "token-tis in on-policy: weight_max=5.0 optim.lr=5e-05 (while tuning 0.650, published 0.550)"

    both = tuning.plan_comparison(comparison, [grpo, tis])
    assert [(run.method.spec, run.seed) for run in both.runs][:4] == [
        ("grpo", 0),
        ("grpo (tuned)", 0),
        ("token-tis", 0),
        ("token-tis (tuned)", 0),
    ]
    names = [run.name for run in both.runs]
    assert names[0] == names[1] == "on-policy/grpo/seed0", "one run for two rows"
    tuned = both.runs[3].config
    assert (tuned.objective.keywords, tuned.optim.lr, tuned.eval.skip) == ({"weight_max": 5.0}, 5e-5, 0)


def test_a_diverged_setting_counts_as_zero_and_a_failed_one_is_named() -> None:
    found = tuning.plan_tuning(planned(["grpo"], ["on-policy"]), 1)
    first, second = found.plan.runs[0].name, found.plan.runs[1].name
    known = results(found, {}) | {first: RunSummary("diverged")}
    [choice] = tuning.choose(found, known)
    assert (choice.settings, choice.published) == ("optim.lr=2.5e-05", 0.0)
    with pytest.raises(TrimtabError, match=rf"^tuning/{second}: no space; the same command tries it again$"):
        tuning.choose(found, known | {second: RunSummary("failed", "no space")})


def test_a_rate_of_one_s_own_is_not_tuned() -> None:
    with pytest.raises(TrimtabError, match=r"method 'grpo:optim.lr=1e-3': --tune chooses optim.lr"):
        tuning.plan_tuning(planned(["grpo:optim.lr=1e-3"], ["on-policy"]), 1)
