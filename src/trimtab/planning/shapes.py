"""Model shapes, read from a config.json or taken from a table of public models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.files import parse_json, regular_file


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
    def attention(self) -> int:
        """Parameters of one layer's attention."""
        weights = 2 * self.hidden * self.queries + 2 * self.hidden * self.keys
        biases = (self.queries + 2 * self.keys) * self.qkv_bias
        return weights + biases + 2 * self.size * self.qk_norm

    @property
    def expert(self) -> int:
        """Parameters of one feed-forward network."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """Parameters of one layer, including its two norms and the router of a mixture."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention + self.experts * self.expert + router + 2 * self.hidden

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
_QKV_BIAS_TYPES, _QK_NORM_TYPES = ("qwen2",), ("qwen3", "qwen3_moe")


def find_shape(model: str) -> Shape:
    """Returns the shape for a name of the table or a folder with a config.json.

    An HF id such as `Qwen/Qwen2.5-Math-7B` is looked up by its last part, without what says how it was trained. Raises
    `TrimtabError` for an unknown name or an incomplete file.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _read(path / "config.json" if path.is_dir() else path)
    name = path.name.lower()
    for part in ("", "-instruct", "-base", "-math", "-thinking-2507"):
        if (plain := name.replace(part, "")) in SHAPES:
            return SHAPES[plain]
    raise TrimtabError(f"unknown model {model!r}{did_you_mean(name, SHAPES)}; or give a folder with its config.json")


def _read(path: Path) -> Shape:
    try:
        data = parse_json(regular_file(path).read_text())
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}; give a model's folder or its config.json") from None
    except ValueError:
        raise TrimtabError(f"{path} is not JSON: give a model's own config.json") from None
    try:
        return _from_config(path.parent.name, data)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise TrimtabError(f"{path} has no {error}: give the config.json of a Llama-like model") from None


def _from_config(name: str, data: Mapping[str, Any]) -> Shape:
    kind, heads = data.get("model_type", ""), int(data["num_attention_heads"])
    experts = int(data.get("num_experts") or data.get("num_local_experts") or 1)
    return Shape(
        name=name,
        layers=int(data["num_hidden_layers"]),
        hidden=int(data["hidden_size"]),
        heads=heads,
        kv=int(data.get("num_key_value_heads") or heads),
        size=int(data.get("head_dim") or data["hidden_size"] // heads),
        intermediate=int(data.get("moe_intermediate_size") or data["intermediate_size"]),
        vocabulary=int(data["vocab_size"]),
        tied=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=bool(data.get("attention_bias", kind in _QKV_BIAS_TYPES)),
        qk_norm=kind in _QK_NORM_TYPES,
        experts=experts,
        active=int(data.get("num_experts_per_tok") or 1),
    )
