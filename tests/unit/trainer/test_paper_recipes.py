"""The recipes of many GPUs, and those of papers: what they set, that nothing is refused, that they fit the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoConfig

from trimtab.objectives import Band, Objective, Veto, Weight
from trimtab.objectives.lookup import from_section
from trimtab.trainer import memory as estimate
from trimtab.trainer import tasks
from trimtab.trainer.config import Config, load_config, recipe_names
from trimtab.trainer.held_out import eval_metrics
from trimtab.trainer.requirements import check_recipe
from trimtab.trainer.rewards import build_weighted

GPUS = {"7b-8gpu": 8, "32b-64gpu": 64}
ROOM = 0.92 * 80e9  # what tensors may fill of a GPU; the rest is CUDA and gaps
# Model -> kind, layers, hidden, heads, key-value heads, inner, vocabulary, tied: its config.json on huggingface.co.
SIZES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 28, 1536, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 28, 3584, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 27648, 152064, False),
    "Qwen/Qwen3-4B-Base": ("qwen3", 36, 2560, 32, 8, 9728, 151936, True),
    "Qwen/Qwen3-4B-Thinking-2507": ("qwen3", 36, 2560, 32, 8, 9728, 151936, True),
}
# Recipe -> objective, prompts x samples, updates a batch, longest response, parameters of the model in billions.
PAPERS: dict[str, tuple[str, int, int, int, int, float]] = {
    "paper-alp": ("token-alp", 512, 8, 16, 2048, 1.5),
    "paper-alp-tools": ("seq-alp", 512, 16, 16, 16384, 7.6),
    "paper-soup": ("soup", 32, 8, 1, 3072, 7.6),
    "paper-oapl": ("oapl", 64, 8, 1, 16384, 4.0),
    **{f"paper-miles-{number}": ("dapo", 256, 16, 1, 16384, 4.0) for number in range(1, 5)},
}


def built(name: str) -> tuple[Config, Objective]:
    config = load_config(name)
    return config, from_section(config.objective.model_dump())


def split(config: Config) -> tuple[int, int, int]:
    """Engines, GPUs of each, ranks."""
    if config.placement == "ray":
        return config.ray.engines, config.engine.vllm.tensor_parallel, config.ray.trainers
    return config.engine.workers, config.engine.vllm.tensor_parallel, 8 - config.engine.workers


def sizes(path: str) -> Any:
    kind, layers, hidden, heads, kv, inner, vocabulary, tied = SIZES[path]
    return estimate.DecoderSizes.of(
        AutoConfig.for_model(
            kind,
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=128,
            intermediate_size=inner,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
        )
    )


def memory(config: Config) -> float:
    """Bytes of a training rank for one micro-batch of responses of full length after prompts of 512 tokens."""
    longest, trainer = config.sampling.max_tokens, config.trainer
    rows = min(trainer.samples, max(1, (trainer.micro_batch_tokens - 512) // longest))
    load = estimate.UpdateLoad(
        *(split(config)[2], 512 + rows * longest, rows * longest, rows, 512, longest),
        recompute=config.model.gradient_checkpointing,
        offload=config.sharding.offload,
    )
    return sum(estimate.rank_memory(sizes(config.model.path), load).values())


def test_every_recipe_of_a_paper_is_here() -> None:
    assert {name for name in recipe_names() if name.startswith("paper-")} == set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_it_has_the_figures_of_its_paper_and_fits(name: str) -> None:
    config, objective = built(name)
    expected, prompts, samples, updates, longest, billions = PAPERS[name]
    trainer = config.trainer
    assert (objective.name, trainer.prompts, trainer.samples) == (expected, prompts, samples)
    assert (trainer.updates_per_step, config.sampling.max_tokens) == (updates, longest)
    check_recipe(config, objective, world_size=4)
    assert sizes(config.model.path).parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert config.engine.vllm.context >= longest + 512
    assert memory(config) < ROOM


@pytest.mark.parametrize("name", ["paper-alp", "paper-alp-tools"])
def test_alp_draws_its_noise_as_the_paper_does(name: str) -> None:
    config, objective = built(name)
    assert (config.perturbation.std, config.perturbation.lr, config.perturbation.per_response) == (1e-4, 5e-4, True)
    assert (objective.kl.coef, objective.entropy_coef, config.optim.weight_decay) == (1e-3, 1e-3, 0.01)


def test_alp_is_evaluated_on_its_five_benchmarks() -> None:
    tasks_of = built("paper-alp")[0].eval.task
    names = [str(task.keywords["dataset"]).rpartition("/")[2] for task in tasks_of]
    assert names == ["MATH-500", "minervamath", "olympiadbench", "aime24", "aime25"]
    assert {task.samples for task in tasks_of} == {32}


def test_soup_selects_by_the_mean_of_two_tasks() -> None:
    config, _ = built("paper-soup")
    assert config.eval.best_metrics == ["eval/aime24/avg@32", "eval/aime25/avg@32"]
    assert [(task.name, task.samples) for task in config.eval.task] == [("hf", 32)] * 2
    assert (config.prefix.ratio, config.prefix.refresh, config.prefix.whole) == (0.5, 8, True)


def test_oapl_refreshes_its_sampler_every_fifty_updates() -> None:
    """The first update after a refresh already trains on new responses: no token is 50 updates old."""
    trainer = built("paper-oapl")[0].trainer
    assert (trainer.sync_every, trainer.max_lag) == (50, 49)


def test_the_four_configurations_of_miles_add_one_part_each() -> None:
    first, second, third, fourth = (built(f"paper-miles-{number}")[1] for number in range(1, 5))
    weight = Weight("token", "clip", 0.5, 2.0)
    masks = (Band("geometric", 0.99, 1.001), Veto(1e-6, "probability"))
    assert (first.weight, first.masks) == (None, ())
    assert (second.weight, second.masks) == (weight, ())
    assert (third.weight, third.masks) == (weight, masks)
    assert (fourth.weight, fourth.masks) == (Weight("token", "clip", 0.5, 2.0, normalize=True), masks)


@pytest.mark.parametrize("name", GPUS)
def test_the_recipe_uses_every_gpu_once_and_fits(name: str) -> None:
    """Tokens of older weights are only corrected by an objective that reads the behavior policy."""
    config, objective = built(name)
    assert config.trainer.max_lag
    assert "behavior" in objective.needs
    check_recipe(config, objective, config.ray.trainers)
    longest, context = config.sampling.max_tokens, config.engine.vllm.context
    engines, each, ranks = split(config)
    assert engines * each + ranks == GPUS[name]
    assert memory(config) < ROOM
    assert min(context, config.trainer.micro_batch_tokens) >= 512 + longest
    if config.placement == "ray":
        assert config.ray.engine_gpus == each


MESSAGES = {
    "prompt": [{"role": "user", "content": "1 + {n}"}],
    "reward_model": {"ground_truth": "{n}", "style": "rule"},
}
# Data set -> a file of it, and a row with the columns that its publisher gives it; {n} is the number of the row.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "LLM360/guru-RL-92k": ("train/math__combined_54.4k.jsonl", {**MESSAGES, "qwen2.5_7b_pass_rate": 0.5}),
    "aaabiao/dapo_filter": ("train.jsonl", MESSAGES),
    "agentica-org/DeepScaleR-Preview-Dataset": ("train.jsonl", {"problem": "1 + {n}", "answer": "{n}"}),
    "open-r1/DAPO-Math-17k-Processed": ("all/train.jsonl", {"prompt": "1 + {n}", "solution": "{n}"}),
    "math-ai/aime24": ("test.jsonl", {"id": "{n}", "problem": "1 + {n}", "solution": "\\boxed{{n}}", "url": ""}),
    "HuggingFaceH4/MATH-500": (
        "test.jsonl",
        {"problem": "1 + {n}", "solution": "", "answer": "{n}", "subject": "Algebra", "level": 2, "unique_id": "{n}"},
    ),
    "math-ai/minervamath": ("test.jsonl", {"question": "1 + {n}", "answer": "{n}"}),
    "math-ai/olympiadbench": ("test.jsonl", {"question": "1 + {n}", "final_answer": ["{n}"], "unit": None}),
    "math-ai/aime25": ("test.jsonl", {"id": "{n}", "problem": "1 + {n}", "answer": "{n}"}),
}
ROWS = 100


def published(folder: Path, keywords: dict[str, Any]) -> tasks.Task:
    """The task of a recipe over a folder that is laid out like the data set that it names."""
    file, row = PUBLISHED[keywords["dataset"]]
    target = folder / keywords["dataset"] / file
    target.parent.mkdir(parents=True)
    target.write_text("".join(json.dumps(row).replace("{n}", str(number)) + "\n" for number in range(ROWS)))
    if "config" in keywords:
        front = f"configs:\n- config_name: {keywords['config']}\n  data_files: {keywords['config']}/*.jsonl"
        (folder / keywords["dataset"] / "README.md").write_text(f"---\n{front}\n---\n")
    files = {"files": keywords["files"].replace(".parquet", ".jsonl")} if "files" in keywords else {}
    return tasks.build("hf", **{**keywords, **files, "dataset": str(folder / keywords["dataset"])})


@pytest.mark.parametrize("name", ["paper-alp", "paper-alp-tools", "paper-soup", "paper-oapl", "paper-miles-1"])
def test_its_columns_are_those_of_the_data_sets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = load_config(name)
    task = published(tmp_path, config.task.keywords)
    assert (len(task.train), len(task.test)) == (ROWS - 1, 1)
    others = [published(tmp_path, other.keywords) for other in config.eval.task]
    for problem in (*task.train, *(problem for other in others for problem in other.test)):
        assert problem.question == f"1 + {problem.answer}"
    assert all(len(other.test) == ROWS for other in others)
    assert {entry.name for built_task in (task, *others) for entry in build_weighted([], built_task)} == {"math"}
    measured = eval_metrics(task.name, config.eval.samples)
    for other, section in zip(others, config.eval.task, strict=True):
        measured += eval_metrics(other.name, section.samples)
    assert set(config.eval.best_metrics) <= set(measured)


def test_turns_without_call_and_answer_are_masked_as_in_the_paper() -> None:
    environment = built("paper-alp-tools")[0].environment
    assert (environment.void, environment.answer, environment.max_turns) == ("mask", r"\\boxed", 5)
