"""What a plan starts from: shapes of models, peaks of GPUs, and assumptions, each with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.files import parse_json, regular_file
from trimtab.trainer.config.section import NotNegative, Positive, Section


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder of the Llama family: gated feed-forward network, grouped-query attention, RMS norms.

    `kv` is the number of key-value heads, `size` the width of one head. A mixture of experts has `experts` networks of
    width `intermediate` in every layer, `active` of them per token; a dense model has one.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv: int
    size: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 1
    active: int = 1

    @property
    def queries(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Channels of all key heads; the values have the same number."""
        return self.kv * self.size

    @property
    def expert(self) -> int:
        """Parameters of one feed-forward network."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """Parameters of one layer: attention, feed-forward networks, the router of a mixture, and two norms."""
        attention = 2 * self.hidden * (self.queries + self.keys) + 2 * self.size * self.qk_norm
        biases = (self.queries + 2 * self.keys) * self.qkv_bias
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + biases + self.experts * self.expert + router + 2 * self.hidden

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def products(self) -> int:
        """Parameters of the layers used per token; of a mixture only those of the active experts."""
        return self.layers * (self.layer - (self.experts - self.active) * self.expert)

    @property
    def kv_values(self) -> int:
        """Values in the key-value cache per token of context."""
        return 2 * self.layers * self.keys


# Sizes from the config.json of each model on huggingface.co (Qwen/..., meta-llama/..., HuggingFaceTB/...); the unit
# tests compare the parameter counts with those of the published files.
_QWEN2: Mapping[str, Any] = {"size": 128, "vocabulary": 152064, "tied": False, "qkv_bias": True}
_QWEN3: Mapping[str, Any] = {"size": 128, "vocabulary": 151936, "tied": False, "qk_norm": True}
_LLAMA: Mapping[str, Any] = {"size": 128, "vocabulary": 128256, "tied": False}
_SMALL: Mapping[str, Any] = {"vocabulary": 151936, "tied": True, "qkv_bias": True}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("laboratory", 2, 128, 4, 4, 32, 336, 14, False),
        Shape("smollm2-135m-instruct", 30, 576, 9, 3, 64, 1536, 49152, True),
        Shape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, **_SMALL),
        Shape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, **_SMALL),
        Shape("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, **_SMALL),
        Shape("qwen2.5-7b", 28, 3584, 28, 4, intermediate=18944, **_QWEN2),
        Shape("qwen2.5-14b", 48, 5120, 40, 8, intermediate=13824, **_QWEN2),
        Shape("qwen2.5-32b", 64, 5120, 40, 8, intermediate=27648, **_QWEN2),
        Shape("qwen2.5-72b", 80, 8192, 64, 8, intermediate=29568, **_QWEN2),
        Shape("qwen3-0.6b", 28, 1024, 16, 8, intermediate=3072, **{**_QWEN3, "tied": True}),
        Shape("qwen3-1.7b", 28, 2048, 16, 8, intermediate=6144, **{**_QWEN3, "tied": True}),
        Shape("qwen3-4b", 36, 2560, 32, 8, intermediate=9728, **{**_QWEN3, "tied": True}),
        Shape("qwen3-8b", 36, 4096, 32, 8, intermediate=12288, **_QWEN3),
        Shape("qwen3-14b", 40, 5120, 40, 8, intermediate=17408, **_QWEN3),
        Shape("qwen3-32b", 64, 5120, 64, 8, intermediate=25600, **_QWEN3),
        Shape("qwen3-30b-a3b", 48, 2048, 32, 4, intermediate=768, experts=128, active=8, **_QWEN3),
        Shape("llama-3.1-8b", 32, 4096, 32, 8, intermediate=14336, **_LLAMA),
        Shape("llama-3.1-70b", 80, 8192, 64, 8, intermediate=28672, **_LLAMA),
    )
}


def find_shape(model: str) -> Shape:
    """Returns the shape for a name of the table or a folder with a config.json.

    An HF id such as `Qwen/Qwen2.5-Math-7B` is looked up by its last part, without what says how it was trained. Raises
    `TrimtabError` for an unknown name or an incomplete file.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _read_shape(path / "config.json" if path.is_dir() else path)
    name = path.name.lower()
    for part in ("", "-instruct", "-base", "-math", "-thinking-2507"):
        if (plain := name.replace(part, "")) in SHAPES:
            return SHAPES[plain]
    raise TrimtabError(f"unknown model {model!r}{did_you_mean(name, SHAPES)}; or give a folder with its config.json")


def _read_shape(path: Path) -> Shape:
    try:
        data = parse_json(regular_file(path).read_text())
        kind, heads = data.get("model_type", ""), int(data["num_attention_heads"])
        return Shape(
            name=path.parent.name,
            layers=int(data["num_hidden_layers"]),
            hidden=int(data["hidden_size"]),
            heads=heads,
            kv=int(data.get("num_key_value_heads") or heads),
            size=int(data.get("head_dim") or data["hidden_size"] // heads),
            intermediate=int(data.get("moe_intermediate_size") or data["intermediate_size"]),
            vocabulary=int(data["vocab_size"]),
            tied=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=bool(data.get("attention_bias", kind == "qwen2")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=int(data.get("num_experts") or data.get("num_local_experts") or 1),
            active=int(data.get("num_experts_per_tok") or 1),
        )
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}; give a model's folder or its config.json") from None
    except ValueError:
        raise TrimtabError(f"{path} is not JSON of a model: give a model's own config.json") from None
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise TrimtabError(f"{path} has no {error}: give the config.json of a Llama-like model") from None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: memory in bytes, peak of dense bfloat16 products in FLOP/s, memory bandwidth in bytes per second."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    source: str


_NVIDIA = "nvidia.com, {} datasheet; the bfloat16 figure is half the one given with sparsity"
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40e9, 312e12, 1.555e12, "nvidia.com, A100 datasheet (SXM)"),
        Device("a100-80gb", 80e9, 312e12, 2.039e12, "nvidia.com, A100 datasheet (SXM)"),
        Device("l40s", 48e9, 362e12, 0.864e12, "nvidia.com, L40S datasheet"),
        Device("h100", 80e9, 989e12, 3.35e12, _NVIDIA.format("H100 (SXM)")),
        Device("h200", 141e9, 989e12, 4.8e12, _NVIDIA.format("H200 (SXM)")),
        Device("b200", 180e9, 2250e12, 8e12, _NVIDIA.format("DGX B200, an eighth of it;")),
        Device("mi300x", 192e9, 1307e12, 5.3e12, "amd.com, Instinct MI300X data sheet"),
    )
}


def find_device(name: str) -> Device:
    """Returns the device of a name in `DEVICES`, in any case. Raises `TrimtabError` for another name."""
    if name.lower() not in DEVICES:
        raise TrimtabError(f"unknown device {name!r}{did_you_mean(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]


Share = Annotated[float, Field(gt=0, le=1)]


class Assumptions(Section, use_attribute_docstrings=True):
    """All numbers of a plan that are neither model sizes, device peaks, nor computed from them."""

    train_flops: Share = 0.30
    """share of the peak, recomputation counted as work; torchtitan reports .33 for Llama 3.1 8B (FSDP2, 8 H100)"""
    decode_bandwidth: Share = 0.60
    """share of the memory bandwidth decoding reaches; a guess"""
    decode_flops: Share = 0.40
    """share of the peak that prefill and large decode batches reach; a guess"""
    decode_overhead: Positive = 0.005
    """seconds of every decode step spent outside the GPU's products; a guess (engine.vllm.eager costs more)"""
    parallel: Share = 0.90
    """share of an engine's speed per GPU that remains with every doubling of its GPUs (tensor parallel); a guess"""
    engine_memory: Share = 0.90
    """share of an engine's GPU it may use; vLLM's own default"""
    engine_workspace: Positive = 4e9
    """bytes of an engine's GPU that hold neither weights nor keys; a guess"""
    sequences: Annotated[float, Field(ge=1)] = 256
    """responses an engine decodes at once at most (vLLM's max_num_seqs)"""
    train_memory: Share = 0.92
    """share of a trainer's GPU that tensors may fill; the rest is CUDA and gaps"""
    handover: Positive = 2e9
    """bytes per second at which the trainer writes its weights and each engine reads them (float32); a guess"""
    score: NotNegative = 0.0
    """seconds of rewards for one batch"""


def parse_assumptions(changes: Iterable[str]) -> Assumptions:
    """Returns the defaults with `name=value` changes.

    Raises `TrimtabError` for an unknown name or a value out of bounds.
    """
    values = {name: value for name, _, value in (change.partition("=") for change in changes)}
    for name in values.keys() - Assumptions.model_fields.keys():
        raise TrimtabError(f"--assume: unknown assumption {name!r}{did_you_mean(name, Assumptions.model_fields)}")
    try:
        return Assumptions.model_validate_strings(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise TrimtabError(f"--assume {first['loc'][0]}={first['input']}: {first['msg']}") from None
