"""Recipes: bases, overrides, sections that come with an objective, and what their paths are relative to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.main import run
from trimtab.errors import TrimtabError
from trimtab.trainer.config import REQUIRED_SECTIONS, PrefixConfig, load_config, recipe_names
from trimtab.trainer.config.recipes import NAMES_OR_FOLDERS, parse_override, split_overrides
from trimtab.trainer.config.training_sections import PerturbationConfig


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_complete_and_equals_its_resolved_copy(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.description
    assert config.out == f"runs/{name}"
    copy = tmp_path / "config.toml"
    copy.write_text(config.dump())
    assert load_config(copy) == config


def test_a_recipe_with_a_base_changes_only_the_keys_it_sets() -> None:
    base, alp = load_config("quickstart"), load_config("token-alp")
    changed = {key for key, value in alp.model_dump().items() if value != base.model_dump()[key]}
    assert changed == {"description", "out", "objective", "perturbation"}
    # The part of another name does not inherit `weight_max` of the base's.
    assert "weight_max" not in alp.objective.keywords


@pytest.mark.parametrize(
    ("base", "named"),
    [("quickstrat", "unknown recipe 'quickstrat'.*quickstart"), ("3", "base = 3"), ("absent.toml", "absent.toml")],
)
def test_an_invalid_base_is_refused(base: str, named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        load_config("quickstart", [f"base={base}"])


def test_keys_and_sections_of_a_base_are_taken_back(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'base = "soup"\nunset = ["prefix", "objective.clip_high", "trainer"]\n[trainer]\nsteps = 5\n'
        '[objective]\nsurrogate = {kind = "unclipped"}\n'
    )
    config = load_config(recipe, ["unset=objective.clip_low", "objective.kl_coef=0.1"])
    assert config.objective.keywords == {"surrogate": {"kind": "unclipped"}, "kl_coef": 0.1}
    assert load_config("soup").prefix != config.prefix == PrefixConfig(), "soup requires the section"
    assert config.trainer == load_config({"trainer": {"steps": 5}}).trainer
    both = ['unset=["prefix", "objective.clip_low"]', "unset=objective.clip_high"]
    assert load_config("soup", both).objective.keywords == {}
    with pytest.raises(TrimtabError, match=r"sets no 'objective.clip_hihg' .did you mean 'objective.clip_high'"):
        load_config("soup", ["unset=objective.clip_hihg"])


def test_what_a_recipe_takes_back_from_its_base_another_base_need_not_set(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "laboratory"\nunset = ["objective.clip_high"]\n')
    assert "clip_high" not in load_config(recipe).objective.keywords
    assert load_config(recipe, ["base=quickstart"]).objective == load_config("quickstart").objective


def test_a_name_that_is_written_down_is_the_one_that_was_implied(tmp_path: Path) -> None:
    base, recipe = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text('[objective]\nsurrogate = {kind = "clipped", high = 0.28}\n')
    recipe.write_text('base = "base.toml"\n[objective]\nname = "composed"\nsurrogate = {kind = "clipped", low = 0.1}\n')
    both = {"surrogate": {"kind": "clipped", "low": 0.1, "high": 0.28}}
    assert load_config(recipe).objective.keywords == both
    assert load_config(base, ["objective.name=composed"]).objective.keywords["surrogate"]["high"] == 0.28
    base.write_text("[objective]\nclip_high = 0.28\n[task]\ndigits = 1\n")
    recipe.write_text(
        'base = "base.toml"\n[objective]\nname = "token-tis"\nweight_max = 3.0\n[task]\nname = "arithmetic"\n'
    )
    config = load_config(recipe, ["objective.name=token-tis", "task.name=arithmetic"])
    assert config.objective.keywords == {"clip_high": 0.28, "weight_max": 3.0}
    assert config.task.keywords == {"digits": 1}
    assert load_config(recipe, ["objective.name=grpo"]).objective.keywords == {}
    for name in ("", 'name = "composed"\n'):
        recipe.write_text(f'base = "base.toml"\n[objective]\n{name}surrogate = {{kind = "clipped"}}\n')
        assert load_config(recipe).objective.keywords == {"surrogate": {"kind": "clipped"}}


def test_a_surrogate_of_another_kind_starts_from_its_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'base = "laboratory"\n[objective]\nname = "composed"\nmask = [{kind = "veto"}]\n'
        'surrogate = {kind = "clipped", low = 0.1, dual = 3}\nweight = {level = "token", min = 0.5}\n'
    )
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'base = "base.toml"\n[objective]\nsurrogate = {kind = "reinforce"}\nweight = {level = "sequence"}\n'
    )
    assert load_config(recipe).objective.keywords == {
        "mask": [{"kind": "veto"}],
        "surrogate": {"kind": "reinforce"},
        "weight": {"level": "sequence", "min": 0.5},
    }
    recipe.write_text('base = "base.toml"\n[objective]\nsurrogate = {dual = 4}\n')
    assert load_config(recipe).objective.keywords["surrogate"] == {"kind": "clipped", "low": 0.1, "dual": 4}


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"base": "soup", "unset": ["prefx"]}, "base 'soup' sets no 'prefx' .did you mean 'prefix'"),
        ({"base": "soup", "unset": ["seed.x"]}, "base 'soup' sets no 'seed.x'"),
        ({"base": "soup", "unset": "prefix"}, "unset = 'prefix': write a list"),
        ({"unset": ["prefix"]}, "has no effect without a base"),
        ({"unset": []}, "has no effect without a base"),
    ],
)
def test_what_the_base_does_not_set_is_not_taken_back(recipe: dict[str, Any], named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        load_config(recipe)


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (tmp_path / "first.toml").write_text('base = "token-alp"\n[optim]\nlr = 2e-5\n[trainer]\nsteps = 5\n')
    (deep / "second.toml").write_text('base = "../first.toml"\n[trainer]\nprompts = 3\nsteps = 7\n')
    config = load_config(deep / "second.toml")
    assert (config.objective.name, config.optim.lr) == ("token-alp", 2e-5)
    assert (config.trainer.steps, config.trainer.prompts) == (7, 3)
    # Of the chain's own end, quickstart.
    assert config.task == load_config("quickstart").task
    assert config.out == "runs/second"
    # A base on the command line takes the place of the recipe's own, with all that one is built on.
    swapped = load_config(deep / "second.toml", ["base=soup"])
    assert (swapped.objective.name, swapped.prefix) == ("soup", load_config("soup").prefix)
    assert (swapped.optim.lr, swapped.trainer.steps) == (load_config("soup").optim.lr, 7)
    assert load_config("laboratory", ["base=laboratory"]) == load_config("laboratory"), "which is no circle"


@pytest.mark.parametrize(
    "bases", [{"a": "a.toml"}, {"a": "b.toml", "b": "c.toml", "c": "./a.toml"}, {"a": "d/../a.toml"}]
)
def test_bases_in_a_circle_are_refused_in_one_line(bases: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, base in bases.items():
        (tmp_path / f"{name}.toml").write_text(f'base = "{base}"\n')
    with pytest.raises(TrimtabError, match=r"base: .*a\.toml -> .*a\.toml is a circle") as raised:
        load_config(tmp_path / "a.toml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "override", "named"),
    [
        ("", "objective=grpo", 'objective is a section: write objective.name = "grpo"'),
        ('objective = "grpo"', "seed=1", 'objective is a section: write objective.name = "grpo"'),
        ('objective = "grpo"', "objective.name=dapo", 'objective is a section: write objective.name = "grpo"'),
        ("", "optim=3", r"optim is a section, not 3: set its keys \(lr, betas"),
        ("", "model.lora=1", r"model.lora is a section, not 1: set its keys \(rank"),
        ("", "reward.name=math", 'write \\[\\[reward\\]\\] .*name = "math"'),
        ('reward = "math"', "seed=1", 'reward is a list.* name = "math"'),
        ('[[reward]]\nname="math"', "reward.name=exact", "reward is a list"),
        ("seed = 3", "seed.x=1", "'seed' is not a section"),
        ("seed = " + "1" * 5000, "seed=1", "not valid TOML"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_refused_in_one_line(
    text: str, override: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(TrimtabError, match=named) as raised:
        load_config(tmp_path / "mine.toml", [override])
    assert "\n" not in str(raised.value)


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert load_config(tmp_path / "mine.toml").seed == 3


def test_changing_the_objective_removes_the_sections_of_the_former_one_in_any_order() -> None:
    overrides = ["objective.name=dapo", "objective.clip_high=0.3"]
    for given in (overrides, overrides[::-1]):
        config = load_config("token-alp", given)
        assert config.perturbation is None
        assert config.objective.keywords == {"clip_high": 0.3}
    kept = load_config("token-alp", ["objective.name=seq-alp", "perturbation.std=0.5"])
    assert kept.perturbation == PerturbationConfig(std=0.5)


@pytest.mark.parametrize(("objective", "section"), REQUIRED_SECTIONS.items())
def test_an_objective_adds_the_section_it_requires(objective: str, section: str) -> None:
    assert getattr(load_config("quickstart"), section) is None
    config = load_config("quickstart", [f"objective.name={objective}"])
    assert getattr(config, section) is not None
    assert f"[{section}]" in config.dump()


@pytest.mark.parametrize(
    "override",
    [
        "threads=9223372036854775808",
        "sampling.temperature=1e39",
        "perturbation.std=1e39",
        "objective.clip_high=1e39",
        "optim.lr=inf",
        "optim.eps=nan",
        "optim.betas=[1.5,2]",
        "optim.grad_clip=1e308",
        "model.lora.rank=1000000000",
        "engine.workers=9223372036854775808",
        "engine.server.timeout=1e9",
        "trainer.samples=0",
        "trainer.steps=true",
        "ray.start_timeout=1e300",
        "ray.trainer_gpus=2",
        'reward=[{name="exact", weight=1e39}]',
        f"task.seed=1{'0' * 400}",
    ],
)
def test_an_unusable_number_is_refused_by_name(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(TrimtabError, match=key.split(".")[0]) as raised:
        load_config("laboratory", [override])
    line = str(raised.value)
    assert "\n" not in line
    assert key.rpartition(".")[2] in line or "reward.0" in line


def test_a_bound_may_be_infinite() -> None:
    assert load_config("laboratory", ["objective.weight_max=inf"]).objective.keywords["weight_max"] == float("inf")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        *(([f"eval.best={best}"], "name at least one metric, and each once") for best in ([], ["eval/a"] * 2)),
        *(
            (["environment.name=python", f"environment.answer='{answer}'"], "'.*' is not a regular expression: ")
            for answer in ("(", "a{99999999999999999999}")
        ),
    ],
)
def test_a_value_that_its_key_cannot_take_is_refused_in_one_line(overrides: list[str], named: str) -> None:
    with pytest.raises(TrimtabError, match=f"{overrides[-1].partition('=')[0]}: {named}") as error:
        load_config("laboratory", overrides)
    assert "\n" not in str(error.value)


def test_a_surrogate_without_a_name_is_an_objective_of_parts_alone() -> None:
    parts = {"surrogate": {"kind": "soft-gate"}, "mask": [{"kind": "veto"}]}
    config = load_config({"objective": parts})
    assert (config.objective.name, config.objective.keywords) == ("composed", parts)
    assert load_config({}, ['objective.surrogate={kind="soft-gate"}']).objective.name == "composed"
    assert load_config({"objective": {"kl_coef": 0.1}}).objective.name == "token-tis"
    # A base that names a method keeps it, as for every other key.
    assert load_config("soup", ['objective.surrogate={kind="soft-gate"}']).objective.name == "soup"


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"mask": [{"kind": "veto"}], "weight": {}}, "weight, mask"),
        ({"ratio": {"level": "sequence"}}, "ratio"),
        ({"centering": True}, "centering"),
    ],
)
def test_other_parts_never_change_the_default_method_unsaid(parts: dict[str, Any], named: str) -> None:
    with pytest.raises(TrimtabError, match=f"objective: {named} without a name") as raised:
        load_config({"objective": parts})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "override",
    [
        'engine.server.urls=["http://someone:hunter2@host:1"]',
        'engine.server.urls=["http://a:1", "https://hunter2@host"]',
        'engine.server.urls=["http://someone:hunter2/3@host:1"]',
        "engine.server.urls=http://someone:hunter2@host:1",
        "engine.server=http://someone:hunter2@host:1",
        "engine.server.urls.first=http://someone:hunter2@host:1",
        "environment.url=http://someone:hunter2@host:1/path",
        "environment=http://someone:hunter2@host:1",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_quoted(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["environment.name=openenv", "sampling.max_tokens=9"] if override.startswith("environment.") else []
    sets = [part for word in [*words, override] for part in ("--set", word)]
    assert run(["show", "laboratory", *sets]) == 2
    printed = "".join(capsys.readouterr())
    assert "hunter2" not in printed
    assert "host" in printed
    if override.startswith('engine.server.urls=["http://someone:hunter2@'):
        assert "set TRIMTAB_SERVER_AUTHORIZATION to the header's value" in printed


def test_overrides_are_stripped_and_split_at_commas_outside_quotes_and_brackets() -> None:
    parsed = [parse_override(text) for text in ("objective.name = grpo", "optim.lr= .1")]
    assert parsed == [("objective.name", "grpo"), ("optim.lr", 0.1)]
    assert split_overrides('task.stop=["]"],seed=1, , a = "x,y"', "x") == ['task.stop=["]"]', "seed=1", ' a = "x,y"']


def test_paths_of_a_recipe_are_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home / "warm", home / "org" / "name", home / "laboratory"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    (home / "base.toml").write_text(
        '[model]\npath = "warm"\n[task]\nname = "file"\npath = "data/a.jsonl"\n[engine]\ntype = "server"\n'
        '[engine.server]\nfolder = "handed"\nurls = ["http://localhost:1"]\n'
    )
    (here / "mine.toml").write_text('base = "../home/base.toml"\n[demonstrations]\npath = "traces.jsonl"\n')
    config = load_config("mine.toml", ["task.test_path=b.jsonl"])
    assert Path(config.model.path) == home / "warm"
    paths = {key: Path(value) for key, value in config.task.keywords.items()}
    assert paths == {"path": home / "data" / "a.jsonl", "test_path": here / "b.jsonl"}
    assert Path(config.demonstrations.path) == here / "traces.jsonl"
    assert Path(str(config.engine.server.folder)) == home / "handed"
    # The resolved copy means the same wherever it lies.
    (home / "config.toml").write_text(config.dump())
    monkeypatch.chdir(tmp_path)
    again = load_config(home / "config.toml")
    for section in ("model", "task", "demonstrations", "engine"):
        assert getattr(again, section) == getattr(config, section)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("laboratory", "laboratory"),  # there is a folder of that name as well
        ("org/name", "{home}/org/name"),
        ("org/absent", "org/absent"),
        ("absent", "absent"),
        ("./absent", "{home}/absent"),
        ("a/b/absent", "{home}/a/b/absent"),
        ("/absent", "/absent"),
        ("~/absent", "{user}/absent"),
    ],
)
def test_a_model_is_a_name_unless_it_is_written_as_a_path_or_lies_there(
    written: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    home = tmp_path / "home"
    for folder in (home / "laboratory", home / "org" / "name"):
        folder.mkdir(parents=True)
    (home / "mine.toml").write_text(f'[model]\npath = "{written}"\n')
    expected = meant.format(home=home, user=tmp_path / "user")
    assert load_config(home / "mine.toml").model.path == expected
    monkeypatch.chdir(home)
    assert load_config({"model": {"path": written}}).model.path == expected
    assert load_config({}, [f"model.path={written}"]).model.path == expected
    assert load_config({}, [f'model={{path="{written}"}}']).model.path == expected


def test_a_data_set_of_one_word_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("chain_sum", "org/math"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    meant = {"chain_sum": "chain_sum", "org/math": str(tmp_path / "org" / "math"), "org/absent": "org/absent"}
    meant["./chain_sum"] = str(tmp_path / "chain_sum")
    for written, expected in meant.items():
        config = load_config({"task": {"name": "hf", "dataset": written}})
        assert config.task.keywords["dataset"] == expected


def test_every_model_that_ships_has_a_name_no_folder_can_take() -> None:
    from trimtab.trainer.models import bundled, laboratory

    assert set(NAMES_OR_FOLDERS["model.path"]) == {bundled.NAME, *laboratory.NAMES}


def test_a_missing_home_directory_is_one_line() -> None:
    with pytest.raises(TrimtabError, match="there is no such user"):
        load_config("laboratory", ["model.path=~nobody-of-this-name/model"])


def test_paths_in_lists_of_tasks_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'base = "laboratory"\n[task]\nname = "mixture"\n[[task.part]]\nname = "file"\npath = "a.jsonl"\n'
        '[[eval.task]]\nname = "file"\npath = "b.jsonl"\ntest_path = "c.jsonl"\n[[eval.task]]\nname = "sort"\n'
    )
    config = load_config(recipe)
    assert config.task.keywords["part"][0]["path"] == str(tmp_path / "a.jsonl")
    assert config.eval.task[0].keywords == {"path": str(tmp_path / "b.jsonl"), "test_path": str(tmp_path / "c.jsonl")}
    assert config.eval.task[1].keywords == {}
