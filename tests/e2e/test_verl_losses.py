"""verl 0.9.1 finds Trimtab by itself and trains with its losses: its own functions, on CPUs."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import bench_environment, forked
from tests.support.bench_environment import check_equal, needs_bench, result_of

pytestmark = [pytest.mark.slow, needs_bench]

Part = Callable[..., Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH for this checkout as an installed package with the entry point of pyproject.toml."""
    folder = tmp_path_factory.mktemp("verl")
    project = (bench_environment.ROOT / "pyproject.toml").read_text()
    assert 'trimtab = "trimtab.adapters.verl"' in project.partition('[project.entry-points."verl.plugins"]')[2]
    info = folder / "site" / "trimtab_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trimtab-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ntrimtab = trimtab.adapters.verl\n")
    return os.pathsep.join([bench_environment.PATH, str(folder / "site")])


@pytest.fixture(scope="module")
def run(bench: forked.Run, path: str) -> Part:
    """Calls a function of `verl_losses.py` in a process of its own."""
    program = Path(__file__).parents[1] / "programs" / "verl_losses.py"
    return lambda part, **variables: result_of(bench(program, part, PYTHONPATH=path, **variables))


def test_grpo_is_the_vanilla_loss_of_verl(run: Part) -> None:
    cases = run("parity")
    planted = cases.pop("planted")
    assert len(cases) == 6
    check_equal(cases, 1e-3)
    assert planted["gradient"] > 0.05  # Another clip bound is seen.


def test_bounds_of_verl_are_taken_over_or_refused(run: Part) -> None:
    cases = run("bounds")
    losses, refused = cases.pop("losses"), cases.pop("refused")
    assert cases.keys() == {"low, high", "high, dual", "null", "sapo"}
    check_equal(cases, 1e-3)
    assert min(abs(one - other) for one, other in itertools.pairwise(losses)) > 1e-3
    named = (
        *("actor.clip_ratio_low=0.1 and policy_loss.trimtab.clip_low=0.3", "clip_ratio: only verl's own loss reads"),
        *("clip_ratio_high: only verl's", "tau_pos: only verl's", "clip_ratio_low: only verl's"),
        *("did you mean 'clip_low'", "keywords of the objective that loss_mode names"),
    )
    for reason, words in zip(refused, named, strict=True):
        assert words in reason


def test_every_setting_that_verl_s_losses_read_is_listed(run: Part) -> None:
    found = run("settings")
    # A field that a later version adds appears here until it is taken over, refused or known to be harmless.
    assert found["unlisted"] == []
    assert {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "dro_beta", "rollout_rs"} <= set(
        found["read"]
    )
    assert found["unread"] == []
    assert found["defaults"] == []


def test_keywords_travel_from_the_command_line_to_the_loss(run: Part) -> None:
    found = run("hydra")
    if found == "no hydra":
        pytest.skip("no hydra here: make bench-install installs it")
    planted = found.pop("planted")
    assert planted["gradient"] > 0.05
    check_equal({name: found[name] for name in ("number", "default", "parts")}, 1e-3)
    named = (
        *("no loss geo-mask-token-tis", "no rollout_is=token-tis", "no effect with loss_mode=vanilla"),
        *("no loss trimtab_token_tis", "no rollout_is=Trimtab-token-tis", "carries log-probs for the losses"),
        *("keywords of the objective that loss_mode names", "rollout_rs", "rollout_is_threshold"),
        *("actor.clip_ratio_low=0.1 and", "clip_ratio", "bypass_mode", "norm_adv_by_std_in_grpo=False", "accepted"),
    )
    for reason, words in zip(found["refused"], named, strict=True):
        assert words in reason


def test_an_objective_of_one_s_own_trains_with_the_lines_of_its_page(run: Part, tmp_path: Path) -> None:
    page = (bench_environment.ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    for name, code in zip(("my_methods", "my_masks"), page.split("```python\n")[1:3], strict=True):
        (tmp_path / f"{name}.py").write_text(code.partition("```")[0])
    (surrogate, _), (mask, logged) = run("documented", cwd=tmp_path)
    # Ratios to the sampler of 1.2 and 0.8 where A = 1, of 1.1 and 1.5 where A = -1.
    assert surrogate == pytest.approx(-0.1 * (math.tanh(2) - math.tanh(2) - math.tanh(1) - math.tanh(5)) / 4, rel=1e-4)
    assert mask == pytest.approx(-(1.2 + 0.8 - 1.1) / 4)  # The last token has 0.004, less than floor_min.
    assert "actor/trimtab/reject/tokens" in logged


def test_without_an_objective_verl_s_losses_and_masks_stay_bit_for_bit(run: Part, tmp_path: Path) -> None:
    """With a folder for the monitor and one for log-probs, and where verl does not load the plugin at all."""
    plain = run("own", VERL_USE_EXTERNAL_PLUGINS="none")
    folders = {"TRIMTAB_MONITOR": str(tmp_path / "monitor"), "TRIMTAB_DUMP": str(tmp_path / "logps")}
    recorded = run("own", **folders)
    assert recorded == plain
    assert len(json.loads((tmp_path / "monitor" / "metrics.jsonl").read_text().splitlines()[-1])) > 20
    computed = {name for name, value in plain.items() if isinstance(value, list)}
    assert {"vanilla", "vanilla, weighted", "gspo", "cispo, weighted", "driver, {'rollout_is': 'sequence'}"} <= computed
    assert plain["vanilla"] != plain["vanilla, weighted"]
    assert plain["configuration"]["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "vanilla"


def test_carried_log_probs_stay_out_of_verl_s_measures(run: Part) -> None:
    """`actor.calculate_sum_pi_squared` makes verl square the weights."""
    cases = run("variance")
    assert cases["log-probs"] == cases["none"]
    key = "variance_proxy/expected_w"
    assert cases["weights"][key] != pytest.approx(cases["none"][key], rel=0.1)


def test_the_name_of_a_loss_is_enough(run: Part) -> None:
    """What else it needs is set or, where it is a choice of the user's, refused before a model is loaded."""
    alone, carrying, proximal, plain, *refused = run("configurations")[0]
    assert alone == carrying == ["passed on to verl", True, "trimtab"]
    assert proximal == plain == ["passed on to verl", False, None]
    aggregation, weights, unknown = (reason for reason, *_ in refused)
    assert aggregation.startswith(
        "icepop aggregates by seq-mean-token-mean, and verl by token-mean: set "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    )
    assert weights.startswith("rollout_is=token takes the place of the sampler's log-probs, which token-tis reads")
    assert unknown.startswith("trimtab-token-tiss: no such objective (did you mean 'token-tis'")


def test_a_configuration_that_would_not_call_the_driver_is_refused(run: Part) -> None:
    _, carried, unscored, *others = run("configurations")
    assert carried == "rollout_is=trimtab has no effect with bypass_mode: turn bypass_mode off"
    assert unscored.startswith("rollout_is=trimtab reads the sampler's log-probs: set actor_rollout_ref.rollout.")
    assert all(one.startswith("passed on to verl: ") for one in others)


def test_the_driver_carries_the_log_probs_of_the_sampler(run: Part) -> None:
    result = run("driver")
    assert result["carried"]
    assert result["mask"]
    assert 0.01 < result["k3"] < 0.1


def test_the_driver_shows_its_batches_to_a_monitor(run: Part, tmp_path: Path) -> None:
    result = run("monitor", TRIMTAB_MONITOR=str(tmp_path))
    assert len(result["figures"]) == 9
    assert all(ours == expected for ours, expected in result["figures"])
    assert all(result["same"])
    assert result["rejected"] > 0
    assert any("k3-jump" in text for text in result["warned"])
    assert result["refused"].startswith("TRIMTAB_MONITOR compares log-probs of sampler and trainer: set actor_rollout")
    # Written when the process ended.
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9
    assert {json.loads(line)["group"] for line in (tmp_path / "sample.jsonl").open()} == {0, 1}


def test_the_driver_stops_at_what_the_environment_names(
    bench: forked.Run, run: Part, path: str, tmp_path: Path
) -> None:
    program = Path(__file__).parents[1] / "programs" / "verl_losses.py"
    names = {"PYTHONPATH": path, "TRIMTAB_MONITOR": str(tmp_path), "TRIMTAB_STOP_ON": "ess"}
    ended = bench(program, "stopped", **names)
    assert ended.returncode == 3, ended.stderr[-2000:]
    assert ended.stderr.splitlines()[-1].startswith("trimtab.errors.GuardStop: step 10: ess: effective sample size")
    assert run("configurations", TRIMTAB_STOP_ON="ess")[-1].startswith("TRIMTAB_STOP_ON needs TRIMTAB_MONITOR=FOLDER")
    assert run("configurations", TRIMTAB_STOP_ON="es")[-1].startswith("stop_on: 'es' cannot be watched")


def test_what_is_missing_is_named(run: Part) -> None:
    named = (
        *("calculate_log_probs=True", "holds weights, not the sampler's log-probs", "loss_agg_mode", "whole update"),
        *("loss_scale_factor", "bypass_mode would replace the loss", "accepted", "losses trimtab-NAME"),
        *("compute_policy_loss_gspo would multiply", "accepted", "compute_optimal_token_baseline_advantage would"),
        *("rollout_rs: only verl's own loss", "rollout_is_batch_normalize: only verl's", "calculate_log_probs=True"),
    )
    for reason, words in zip(run("refusals"), named, strict=True):
        assert words in reason


def test_verl_loads_the_plugin_and_a_failure_is_loud(bench: forked.Run, path: str, tmp_path: Path) -> None:
    program = tmp_path / "names.py"
    registry = "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY"
    program.write_text(f"import verl; {registry}; print(sorted(POLICY_LOSS_REGISTRY))")
    names = bench(program, PYTHONPATH=path)
    assert "trimtab-icepop" in names.stdout
    assert "trimtab-composed" in names.stdout
    assert names.stderr.count("trimtab could not register") == 0
    # A version of verl without what the plugin replaces, beside the program.
    planted = "import verl.utils.config as c; del c.validate_config"
    (tmp_path / "planted.py").write_text(planted)
    broken = bench(program, PYTHONPATH=path, VERL_USE_EXTERNAL_MODULES="planted")
    assert "trimtab could not register its objectives with verl" in broken.stderr
    assert "validate_config" in broken.stderr
    assert "use verl 0.9.1" in broken.stderr
