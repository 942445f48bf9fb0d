"""Shared by the end-to-end tests: a model with the real tokenizer that trains in no time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import bench_environment, forked

from trimtab.trainer.models import bundled
from trimtab.trainer.sandbox.python_pool import SandboxName, sandbox_unavailable


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of two layers with the tokenizer of SmolLM2; vLLM has no kernels for heads below 32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source, folder = bundled.folder(), tmp_path_factory.mktemp("model") / "tiny"
    config = AutoConfig.from_pretrained(source)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    for key, value in (sizes | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}).items():
        setattr(config, key, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def laboratory() -> Any:
    import torch

    from trimtab.trainer.models.load import load
    from trimtab.trainer.sft import laboratory_folder

    return load(str(laboratory_folder()), dtype=torch.float32)


@pytest.fixture(scope="session")
def prompts(laboratory: Any) -> list[Any]:
    """Three of the laboratory's."""
    from trimtab.trainer import tasks

    task = tasks.build("sort")
    return [tasks.encode(task, problem, laboratory.tokenizer) for problem in task.train[:3]]


@pytest.fixture(scope="module", params=["monty", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> SandboxName:
    if missing := sandbox_unavailable(request.param):
        pytest.skip(missing)
    return request.param


@pytest.fixture(scope="session")
def python() -> Iterator[forked.Run]:
    """Runs programs that find imported what a run of the trainer imports."""
    ours = ("trimtab.cli.main", "trimtab.trainer.run", "trimtab.report", "trimtab.diagnosis")
    others = ("matplotlib.figure", "rich.console", "rich.table", "transformers.models.llama.modeling_llama")
    with forked.starter(*ours, *others) as run:
        yield run


@pytest.fixture(scope="session")
def bench() -> Iterator[forked.Run]:
    """Runs programs in the environment of `make bench-install`, with this checkout's package and TRL imported."""
    peers = ("tensordict", "ray", "trl.trainer.grpo_trainer", "trl.experimental.async_grpo.async_grpo_trainer")
    variables = os.environ | {"PYTHONPATH": bench_environment.PATH, "TRL_EXPERIMENTAL_SILENCE": "1"}
    with forked.starter(*peers, python=bench_environment.PYTHON, environment=variables) as run:
        yield run
