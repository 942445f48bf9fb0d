"""The receipt of a preflight: equal for equal pairs, another one for every choice that can change bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.preflight.build_pair import build_pair, pair_config
from trimtab.preflight.receipt import model_digest, receipt, tokenizer_digest

Record = dict[str, Any]


def record(
    folder: Path, *sets: str, trainer: str = "transformers", file: Path | None = None, lengths: Sequence[int] = (8,)
) -> Record:
    config = pair_config("laboratory", None, "float32", None, sets)
    return receipt(config, trainer, build_pair(config, trainer, file, 1e-8, folder, print), lengths)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return record(tmp_path_factory.mktemp("first"))


def test_the_same_pair_has_the_same_receipt(tmp_path: Path, first: Record) -> None:
    again = record(tmp_path, "engine.hang_timeout=99")  # which changes no bit
    assert again == first
    assert first["versions"]["torch"] == torch.__version__
    assert first["hardware"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert first["attention"] == {"sampler": "sdpa", "trainer": "sdpa"}


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("sampler", {"sets": ["engine.dtype=bfloat16"]}),
        ("sampler", {"sets": ["engine.quantize=int8"]}),
        ("trainer", {"sets": ["model.autocast=bfloat16"]}),
        ("trainer", {"trainer": "trimtab"}),
        ("numerics", {"sets": ["numerics=invariant"], "trainer": "trimtab"}),
        ("sampling", {"sets": ["sampling.temperature=0.7"]}),
        ("seed", {"sets": ["seed=1"]}),
        ("lengths", {"lengths": (9,)}),
        ("prompts_sha256", {"file": "27=\n"}),
    ],
)
def test_another_choice_has_another_receipt(changed: str, options: Record, tmp_path: Path, first: Record) -> None:
    if "file" in options:
        (tmp_path / "prompts.txt").write_text(options["file"])
        options = options | {"file": tmp_path / "prompts.txt"}
    other = record(tmp_path, *options.pop("sets", ()), **options)
    assert other[changed] != first[changed]
    assert other["sha256"] != first["sha256"]


def test_threads_kernels_weights_and_tokenizer_are_choices(
    tmp_path: Path, first: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setattr(torch, "get_num_threads", lambda: first["threads"] + 1)
    config = pair_config("laboratory", None, "float32", None, [])
    pair = build_pair(config, "transformers", None, 1e-8, tmp_path, print)
    weight = pair.trainer.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    pair.tokenizer.chat_template = "another"
    pair.trainer.model.config.rms_norm_eps *= 2
    other = receipt(config, "transformers", pair, [8])
    different = {name for name in first if other[name] != first[name]}
    assert different == {
        *("sha256", "threads", "environment"),
        *("model_sha256", "model_config_sha256", "tokenizer_sha256"),
    }


def test_the_digest_of_a_model_by_hand() -> None:
    model = torch.nn.ModuleDict({"b": torch.nn.Linear(1, 2), "a": torch.nn.Linear(1, 1, bias=False)})
    with torch.no_grad():
        for value, p in enumerate(model.parameters()):
            p.fill_(value)
    lines = (
        (b"a.weight torch.float32 (1, 1)\n", [2.0]),
        (b"b.bias torch.float32 (2,)\n", [1.0, 1.0]),
        (b"b.weight torch.float32 (2, 1)\n", [0.0, 0.0]),
    )
    expected = b"".join(line + torch.tensor(values).numpy().tobytes() for line, values in lines)
    assert model_digest(model) == hashlib.sha256(expected).hexdigest()
    assert model_digest(model.to(torch.bfloat16)) != hashlib.sha256(expected).hexdigest()


def test_calls_of_a_tokenizer_do_not_change_its_digest(tmp_path: Path) -> None:
    config = pair_config("laboratory", None, "float32", None, [])
    tokenizer = build_pair(config, "trimtab", None, 1e-8, tmp_path, print).tokenizer
    before = tokenizer_digest(tokenizer)
    tokenizer(["1", "27="], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before
