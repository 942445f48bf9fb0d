"""Which runs a grid and its tuning have, what is refused before anything is trained, and what tuning chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.objectives import objectives
from trimtab.objectives.lookup import from_section
from trimtab.runs.summary import RunSummary
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.lab import tuning
from trimtab.trainer.lab.experiment import (
    METHODS,
    REGIMES,
    ExperimentPlan,
    parse_method,
    plan_experiment,
    plan_from_recipe,
)
from trimtab.trainer.lab.regimes import PARTS, RECIPE, regime
from trimtab.trainer.run import build_parts


def planned(methods: list[str], regimes: list[str], seeds: int = 1, **more: object) -> ExperimentPlan:
    return plan_experiment(methods, [regime(name) for name in regimes], seeds, Path("out"), **more)  # pyright: ignore[reportArgumentType]


def test_every_method_meets_every_regime_with_every_seed() -> None:
    plan = planned(["dapo", "icepop:weight_max=3"], ["on-policy", "stale-32+int3"], seeds=2)
    runs = {run.name: run for run in plan.runs}
    assert list(runs) == [
        f"{regime}/{method}/seed{seed}"
        for seed in (0, 1)
        for method in ("dapo", "icepop_weight_max_3")
        for regime in ("on-policy", "stale-32+int3")
    ]
    config = runs["stale-32+int3/icepop_weight_max_3/seed1"].config
    assert (config.seed, config.trainer.sync_every, config.engine.quantize) == (1, 32, "int3")
    assert (config.objective.name, config.objective.keywords) == ("icepop", {"weight_max": 3})
    assert config.out == "out/stale-32+int3/icepop_weight_max_3/seed1"
    assert (config.log.trajectories_every, config.threads) == (0, 1)
    (run,) = planned(["token-tis"], ["on-policy"]).runs
    assert run.config.objective.keywords == {}, "the laboratory recipe has a wider clip for its own token-tis"


def test_methods_of_a_regime_have_equal_updates_and_rate() -> None:
    runs = planned(list(METHODS), list(REGIMES)).runs
    for name in REGIMES:
        here = [run.config for run in runs if run.regime.name == name]
        assert len(here) == len(METHODS)
        assert len({(c.trainer.steps, c.trainer.epochs, c.trainer.minibatches, c.optim.lr) for c in here}) == 1


def test_keywords_of_a_method() -> None:
    table = 'mask=[{kind="opsm",delta=0.05},{kind="veto",min=0.1}],weight={level="token",max=3.0},kl=\'k1,a=2\''
    assert parse_method(f"grpo:{table},kl_coef=0.1").overrides == (
        'objective.mask=[{kind="opsm",delta=0.05},{kind="veto",min=0.1}]',
        'objective.weight={level="token",max=3.0}',
        "objective.kl='k1,a=2'",
        "objective.kl_coef=0.1",
    )
    method = parse_method("m2po:form=mask,perturbation.std=0.01,tau=[1,2]")
    assert method.objective == "m2po"
    assert method.overrides == ("objective.form=mask", "perturbation.std=0.01", "objective.tau=[1,2]")
    own = parse_method("tests.unit.objectives.own_rule:dppo:divergence_max=0.1")
    assert (own.objective, own.overrides) == ("tests.unit.objectives.own_rule:dppo", ("objective.divergence_max=0.1",))


def test_the_folder_of_a_method_is_a_file_name() -> None:
    assert parse_method("m2po:form=mask,tau=[1,2]").folder == "m2po_form_mask_tau_1_2_"
    assert parse_method("tests.unit.objectives.own_rule:dppo").folder == "tests.unit.objectives.own_rule_dppo"
    long = [f"grpo:mask=[{','.join([one] * 12)}]" for one in ('{kind="veto",min=0.1}', '{kind="veto",min=0.2}')]
    first, second = (parse_method(spec).folder for spec in long)
    assert max(len(first), len(second)) <= 120
    assert first != second
    last = [parse_method(long[0][:-2] + end).folder for end in ("}]", "},{kind='opsm'}]")]
    assert last[0] == first != last[1]


@pytest.mark.parametrize("spec", ["icepop:weight_max", "icepop:3", ":a=1", "", "icepop:=3"])
def test_a_method_that_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(TrimtabError, match=r"write it as|section\.key=value|is not KEY=VALUE"):
        parse_method(spec)


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["seed=3"], "seed belongs to the experiment, use --seeds"),
        (["objective.name=grpo"], "objective.name belongs to the experiment, use --methods"),
        (["base=quickstart"], "base belongs to the experiment, use --model"),
        (["trainer.sync_every=4"], "trainer.sync_every is set by regime 'stale-32'"),
        (["trainer.step=4"], "unknown key 'trainer.step'"),
        (["unset=prefix"], "methods start from their own defaults; set prefix to"),
    ],
)
def test_a_changed_key_that_is_not_free_is_refused_by_name(sets: list[str], line: str) -> None:
    with pytest.raises(TrimtabError, match=line):
        planned(["dapo"], ["stale-32"], sets=sets)


def test_budgets_may_be_changed_and_evaluations_follow() -> None:
    (run,) = planned(["dapo"], ["stale-32"], sets=["trainer.steps=40", "optim.lr=1e-3"]).runs
    assert (run.config.trainer.steps, run.config.optim.lr, run.config.eval.every) == (40, 1e-3, 8)
    (run,) = planned(["dapo"], ["stale-32"], sets=["eval.every=3"]).runs
    assert run.config.eval.every == 3


def test_words_named_twice_are_refused() -> None:
    with pytest.raises(TrimtabError, match="method 'dapo' is named twice"):
        planned(["dapo", "dapo"], ["on-policy"])
    with pytest.raises(TrimtabError, match="regime 'int3' is named twice"):
        planned(["dapo"], ["int3", "int3"])
    for named, seeds, twice in (("grpo,dapo,grpo", [0], "objective 'grpo'"), ("grpo", [0, 0], "seed '0'")):
        sets = [f"compare.objectives={named.split(',')}", f"compare.seeds={seeds}"]
        with pytest.raises(TrimtabError, match=f"{twice} is named twice"):
            plan_from_recipe(load_config("laboratory", sets), Path("out"))


def test_a_regime_without_room_for_a_method_leaves_that_pair_out_and_says_why() -> None:
    plan = planned(["soup", "dapo"], ["on-policy", "stale-32"])
    assert [run.name for run in plan.runs] == ["on-policy/soup/seed0", "on-policy/dapo/seed0", "stale-32/dapo/seed0"]
    (refused,) = plan.skipped
    assert (refused.method.spec, refused.regime.name) == ("soup", "stale-32")
    assert "trainer.sync_every" in refused.reason


def test_a_method_that_fits_nowhere_is_a_mistake() -> None:
    with pytest.raises(TrimtabError, match=r"method 'dapo:weight_max=3': objective 'dapo' has no keyword"):
        planned(["dapo:weight_max=3"], ["on-policy", "int3"])


def test_a_real_model_keeps_its_recipe_s_budget_and_task() -> None:
    (run,) = planned(["dapo"], ["int3+stale-8"], model="some/model").runs
    config = run.config
    assert (config.model.path, config.task.name) == ("some/model", "arithmetic")
    assert (config.trainer.steps, config.optim.lr) == (30, 1e-5)
    assert (config.engine.quantize, config.trainer.sync_every) == ("int3", 8)
    with pytest.raises(TrimtabError, match="regime 'moe' has its own model"):
        planned(["dapo"], ["moe"], model="some/model")


def test_the_laboratory_in_several_turns_has_its_own_recipe_and_budget() -> None:
    (run,) = planned(["seq-alp:perturbation.layers=0-2"], ["stale-8+int4"], model="laboratory-tools").runs
    config, recipe = run.config, load_config("laboratory-tools")
    assert (config.model.path, config.task.name) == ("laboratory-tools", "swap-sort")
    assert config.environment == recipe.environment is not None
    assert (config.trainer.steps, config.optim) == (recipe.trainer.steps, recipe.optim)
    assert (config.engine.quantize, config.trainer.sync_every) == ("int4", 8)


def test_the_laboratory_of_long_responses_has_the_budgets_in_proportion() -> None:
    recipe = load_config("laboratory-long")
    steps, rate = recipe.trainer.steps, recipe.optim.lr
    regimes = ["on-policy", "stale-32", "reuse-16"]
    runs = [run.config for run in planned(["grpo"], regimes, model="laboratory-long").runs]
    assert all((run.model.path, run.task) == ("laboratory-long", recipe.task) for run in runs)
    warm = [run.config.sft.seed for run in planned(["grpo"], ["on-policy"], 4, model="laboratory-long").runs]
    assert warm == [0, 1, 2, 0]
    # Of `laboratory`: 80 steps at 1e-4, 128 at 5e-5, and 16 of 16 updates at 1e-4.
    assert [run.trainer.steps for run in runs] == [steps, round(steps * 1.6), round(steps * 0.2)]
    assert [run.optim.lr for run in runs] == pytest.approx([rate, rate / 2, rate])


def configs(recipe: str, *objectives: str, overrides: tuple[str, ...] = ()) -> dict[str, Config]:
    compare = [f"compare.objectives={list(objectives)}", "compare.seeds=[3]"]
    config = load_config(recipe, ["base=laboratory", *overrides, *compare])
    made = {run.method.objective: run.config for run in plan_from_recipe(config, Path("out")).runs}
    for one in made.values():
        build_parts(one).close()
    assert all(one.seed == 3 and one.compare is None for one in made.values())
    return made


def test_a_section_stays_with_the_objective_it_belongs_to() -> None:
    made = configs("token-alp", "token-alp", "dapo", "soup")
    assert [config.perturbation is not None for config in made.values()] == [True, False, False]
    assert made["soup"].prefix is not None


def test_only_the_objective_of_the_recipe_has_its_keywords_and_advantage() -> None:
    added = ("objective.weight_max=9.0", 'objective.mask=[{kind="veto"}]', "advantage.kind=rloo")
    made = configs("laboratory", "token-tis", "icepop", "grpo", overrides=("objective.name=token-tis", *added))
    assert made["token-tis"].objective.keywords.items() >= {"weight_max": 9.0, "mask": [{"kind": "veto"}]}.items()
    assert made["icepop"].objective.keywords == made["grpo"].objective.keywords == {}
    assert [config.advantage.kind for config in made.values()] == ["rloo", None, None]


@pytest.mark.parametrize("name", PARTS)
def test_every_regime_is_a_recipe_that_differs_from_on_policy_by_its_mechanism(name: str) -> None:
    config = load_config(RECIPE, regime(name).settings())
    plain = load_config(RECIPE, regime("on-policy").settings())
    assert (config == plain) == (name == "on-policy")
    assert config.trainer.steps * config.trainer.minibatches * config.trainer.epochs >= 80


def test_updates_are_what_a_batch_makes_of_the_steps() -> None:
    assert regime("reuse-16").settings() == (
        "trainer.minibatches=4",
        "trainer.epochs=4",
        "trainer.steps=16",
        "optim.lr=0.0001",
    )
    assert "trainer.steps=64" in regime("reuse-4").settings()
    assert regime("reuse-4").description.endswith("(4 mini-batches, 1 epoch)")


def test_a_mixture_has_both_mechanisms_the_longer_budget_and_the_lower_rate() -> None:
    mixed = regime("int3+stale-32")
    assert mixed.settings() == ("engine.quantize=int3", "trainer.sync_every=32", "trainer.steps=128", "optim.lr=5e-05")
    assert mixed.name == "int3+stale-32"
    assert set(regime("stale-32+int3").settings()) == set(mixed.settings())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int5", ["unknown regime 'int5'", "did you mean"]),
        ("stale-32+", ["unknown regime ''"]),
        ("int8+int3", ["'int8' and 'int3' both set engine.quantize"]),
        ("stale-8+stale-32", ["both set trainer.sync_every"]),
        ("moe+int8+int3", ["both set engine.quantize"]),
        ("moe+moe+bf16", ["names 'moe' twice"]),
    ],
)
def test_regimes_that_do_not_exist_or_fit_are_refused(name: str, words: list[str]) -> None:
    with pytest.raises(TrimtabError) as caught:
        regime(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


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
        settings = tuning.list_candidates(parse_method(name), 1e-4)
        assert len({*settings}) == len(settings) == tuning.BUDGET == 6
        assert settings[0] == name


@pytest.mark.parametrize("name", sorted(tuning.OTHER_BOUND))
def test_the_other_bound_is_a_keyword_of_its_method_with_another_value(name: str) -> None:
    """A recipe refuses unknown keywords, and keywords without effect."""
    published, other = (
        load_config("laboratory", ['unset=["objective"]', f"objective.name={name}", *parse_method(spec).overrides])
        for spec in (name, f"{name}:{tuning.OTHER_BOUND[name]}")
    )
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
    comparison = planned(["grpo", "token-tis"], ["on-policy"], seeds=2)
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
    found = tuning.plan_tuning(planned(["grpo"], ["on-policy"], seeds=2), 1)
    first, second = found.plan.runs[0].name, found.plan.runs[1].name
    known = results(found, {}) | {first: RunSummary("diverged")}
    [choice] = tuning.choose(found, known)
    assert (choice.settings, choice.published) == ("optim.lr=2.5e-05", 0.0)
    with pytest.raises(TrimtabError, match=rf"^tuning/{second}: no space; the same command tries it again$"):
        tuning.choose(found, known | {second: RunSummary("failed", "no space")})


def test_a_rate_of_one_s_own_is_not_tuned() -> None:
    with pytest.raises(TrimtabError, match=r"method 'grpo:optim.lr=1e-3': --tune chooses optim.lr"):
        tuning.plan_tuning(planned(["grpo:optim.lr=1e-3"], ["on-policy"]), 1)
