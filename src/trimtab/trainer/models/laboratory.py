"""The laboratory models: small enough to train in seconds, hard enough to tell methods apart.

The basic model has 393k parameters and 14 characters. It sorts ten digits: `3141592653=` continues as `1123345569.`.
Train it with a few supervised steps, then compare objectives under controlled mismatch. Mixtures of experts of the same
size have another source of mismatch: trainer and sampler may route a token to different experts. This causes little of
the shallow mixture's mismatch, and nearly all of the deep mixture's, which uses one expert per token.
A deeper dense model sorts with a tool, in multi-turn episodes (recipe `laboratory-tools`); another writes out every
step, in responses of 120 tokens (recipe `laboratory-long`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trimtab.trainer.models.packed_attention import PACKED_IMPLEMENTATION

NAME, MIXTURE, SWITCH, TOOLS = "laboratory", "laboratory-moe", "laboratory-switch", "laboratory-tools"
LONG = "laboratory-long"


class _Design(NamedTuple):
    """The sizes of a model: dense (Llama) without `experts`, otherwise Qwen3-MoE.

    Every layer of a mixture has the experts, which together are about as large as a dense layer of this width. The size
    of an expert is a multiple of 8: grouped products need rows aligned to 16 bytes, in bfloat16 too.
    """

    width: int = 128
    inner: int = 336
    layers: int = 2
    context: int = 64
    experts: tuple[int, int, int] | None = None  # number, experts per token, size of each


_DESIGNS = {
    NAME: _Design(),  # 393k parameters
    MIXTURE: _Design(experts=(8, 2, 40)),  # 383k
    SWITCH: _Design(width=64, layers=6, experts=(16, 1, 16)),  # 402k
    TOOLS: _Design(width=64, inner=176, layers=6),  # 304k
    LONG: _Design(width=96, inner=264, layers=4, context=256),  # 455k
}
NAMES = tuple(_DESIGNS)
# "." ends a response and " " pads; both belong to the 14 characters.
ALPHABET = "0123456789=. ?"
PADDING, END, UNKNOWN = " ", ".", "?"


def build(seed: int, name: str = NAME) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns an untrained laboratory model (float32) and its character tokenizer. Equal seeds give equal weights.

    `name` is one of `NAMES`. The tokenizer adds no tokens: each character is one token, `.` ends a text, ` ` pads, any
    other character is `?`.
    """
    settings = _config(_DESIGNS[name])
    settings._attn_implementation = PACKED_IMPLEMENTATION
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings) if isinstance(settings, LlamaConfig) else Qwen3MoeForCausalLM(settings)
    return model.eval(), _tokenizer()


def _config(design: _Design) -> LlamaConfig | Qwen3MoeConfig:
    shared: dict[str, Any] = {
        "vocab_size": len(ALPHABET),
        "hidden_size": design.width,
        "intermediate_size": design.inner,
        "num_hidden_layers": design.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": design.context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ALPHABET.index(END),
        "pad_token_id": ALPHABET.index(PADDING),
    }
    if design.experts is None:
        return LlamaConfig(**shared)
    experts, chosen, size = design.experts
    return Qwen3MoeConfig(
        **shared,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=size,
        norm_topk_prob=chosen > 1,  # the gate of a single expert would be 1, and the router would learn nothing
        decoder_sparse_step=1,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(ALPHABET)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()  # no blanks between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PADDING,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
