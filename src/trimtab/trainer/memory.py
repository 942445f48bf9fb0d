"""Chooses the tokens of a micro-batch from an estimate of the peak memory of a training rank during an update.

    weights, gradients, optimizer    P x (1 + 1 + 2) x master bytes, over the ranks
    copies                           weights in the dtype of the products: all layers on one rank; when sharded, two
                                     layers, the gradient of one, and all weights outside of the layers
    kept                             activations kept for the backward; with checkpointing, one input for each layer
    layer                            one layer during its backward
    attention                        on a CPU one block of scores and its mask: some queries of a long row, or several
                                     short rows; on an accelerator, with no scores kept, rows of prompt and response
    head                             hidden states, tiles of logits, and the dense gradient of the head

All terms are in bytes. `benchmarks/memory.py` compares the terms with measurements on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trimtab.trainer.config import Config
from trimtab.trainer.models import fused_head
from trimtab.trainer.models.architecture import decoder_stack
from trimtab.trainer.models.fused_head import KEPT_LOGITS, TILE_TOKENS, TILE_VOCABULARY
from trimtab.trainer.models.packed_attention import BLOCK_QUERIES, BLOCK_SCORES, MAX_SAVED_SCORES

FLOAT32 = 4  # bytes of a value

CPU_TOKENS = 2048
"""Tokens of a micro-batch on a CPU, where larger ones are not faster, and on devices whose memory is not known."""
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Sizes to try on a GPU. Larger ones are not faster: kernels then compute for longer than their launch takes."""
MARGIN = 0.8
"""Share of the free memory that the estimate may fill: it is right within 15%, and memory is fragmented."""


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this process can still allocate on a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def choose_micro_batch_tokens(
    config: Config,
    model: nn.Module,
    device: torch.device,
    *,
    prompt: int,
    response: int,
    ranks: int = 1,
    update: int = 0,
) -> int:
    """Returns the value of `trainer.micro_batch_tokens`, or for "auto" the largest of `SIZES` that fits free memory.

    Call it when the weights are on the device, before the first update: it assumes that gradients and optimizer state
    are not allocated yet. prompt, response: tokens of the longest expected prompt and response. update: tokens of an
    update; with several ranks a micro-batch has at most a rank's share of them.
    """
    chosen = config.trainer.micro_batch_tokens
    if chosen != "auto":
        return chosen
    if device.type != "cuda":
        return CPU_TOKENS
    sizes, available = DecoderSizes.of(model.config), MARGIN * free_memory(device)  # pyright: ignore[reportArgumentType]
    master = getattr(torch, config.model.dtype).itemsize
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    state = 0 if config.sharding.offload else 3 * trained * master / ranks
    most = max(SIZES[0], update // ranks) if ranks > 1 else SIZES[-1]
    compute = 2 if config.model.autocast == "bfloat16" else master
    numbers = {"master": master, "compute": compute, "recompute": config.model.gradient_checkpointing}
    for tokens in [size for size in reversed(SIZES) if size <= most]:
        rows, most_run = max(1, tokens // (prompt + response)), max(tokens, prompt + response)
        load = UpdateLoad(
            ranks=ranks, tokens=most_run, scored=rows * response, rows=rows, prompt=prompt, response=response, **numbers
        )
        terms = rank_memory(sizes, load)
        if state + sum(terms[name] for name in ("copies", "kept", "layer", "attention", "head")) <= available:
            return tokens
    return SIZES[0]


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder: gated feed-forward network, grouped-query attention, RMS norms."""

    layers: int
    hidden: int
    heads: int
    queries: int  # channels of all query heads
    keys: int  # channels of all key heads, and of all value heads
    inner: int  # width of the feed-forward network; in a mixture, of all experts of one token
    vocabulary: int
    layer: int  # parameters of one layer
    parameters: int  # of the whole model
    tied: bool  # whether the head is the embedding
    qk_norm: bool = False  # whether queries and keys are normalized

    @classmethod
    def of(cls, config: PreTrainedConfig) -> DecoderSizes:
        """Returns the sizes of the model that a transformers configuration describes, without allocating weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = decoder_stack(model).layers
        config = config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        inner = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
        return cls(
            layers=len(layers),
            hidden=config.hidden_size,
            heads=heads,
            queries=heads * size,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
            inner=next(filter(None, inner), 4 * config.hidden_size)
            * (getattr(config, "num_experts_per_tok", None) or 1),
            vocabulary=config.vocab_size,
            layer=max(map(_parameters, layers)),
            parameters=_parameters(model),
            tied=config.tie_word_embeddings,
            qk_norm=hasattr(layers[0], "self_attn") and hasattr(layers[0].self_attn, "q_norm"),
        )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, slots=True)
class UpdateLoad:
    """The sharding and the micro-batch of one training process."""

    ranks: int
    tokens: int  # run through the layers
    scored: int  # response tokens, run through the head
    rows: int  # responses in the micro-batch
    prompt: int  # tokens of the longest prompt
    response: int  # tokens of the longest response
    master: int = 4  # bytes per value of weights, gradients and optimizer state
    compute: int = 2  # bytes per value in products
    recompute: bool = False  # gradient checkpointing
    offload: bool = False  # optimizer in CPU memory
    cpu: bool = False  # whether it computes on a CPU, in smaller blocks

    @property
    def row_tokens(self) -> int:
        """Tokens if every response had its own copy of the prompt."""
        return self.rows * (self.prompt + self.response)


def rank_memory(sizes: DecoderSizes, load: UpdateLoad) -> dict[str, float]:
    """Returns the bytes on the device at the peak of an update, by term."""
    compute, hidden = load.compute, sizes.hidden
    shard = 0.0 if load.offload else sizes.parameters * load.master / load.ranks
    layer = layer_activations(sizes, load) * load.tokens
    # The last residual, its norm, and the output of that norm.
    last = 3 * FLOAT32 * hidden * load.tokens
    if load.recompute:
        kept = sizes.layers * FLOAT32 * hidden * load.tokens + last
    else:
        scores = load.rows * sizes.heads * load.response * (load.prompt + load.response)
        attention = scores * compute if load.cpu and scores <= MAX_SAVED_SCORES else 0.0
        if not load.cpu:  # besides packed tokens, rows of a prompt and a response each
            rows = load.row_tokens * (2 * compute * (sizes.queries + sizes.keys) + FLOAT32 * sizes.heads)
            attention = rows - load.tokens * compute * (sizes.queries + 2 * sizes.keys)
        kept = sizes.layers * (layer + attention) + last
    logits = load.scored * sizes.vocabulary * compute
    kept += logits if logits <= KEPT_LOGITS else 0.0
    # Gradients in the widest part of a layer, and with checkpointing its activations.
    gradients = (3 * compute * sizes.inner + 3 * FLOAT32 * hidden) * load.tokens
    # Hidden states and their gradient in float32 and in the dtype of the products.
    states = load.scored * hidden * (2 * FLOAT32 + 2 * compute)
    # Both sides of a tile are larger on an accelerator.
    tile = TILE_TOKENS * TILE_VOCABULARY * (1 if load.cpu else fused_head.ACCELERATED**2)
    return {
        "weights": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "copies": _copies(sizes, load),
        "kept": kept,
        "layer": gradients + (layer if load.recompute else 0.0),
        "attention": _attention(sizes, load),
        "head": states + 3 * tile * FLOAT32 + sizes.vocabulary * sizes.hidden * load.master,
    }


def layer_activations(sizes: DecoderSizes, load: UpdateLoad) -> float:
    """Returns the bytes per token that a layer keeps for its backward."""
    # The residual before attention and before the feed-forward network, and the norms of both.
    residuals = 4 * FLOAT32 * sizes.hidden
    # Autocast makes a rounded copy of the input of every product: queries, keys, values, gate and up. In float32 the
    # CPU kernels make a padded copy instead.
    inputs = 5 * load.compute * sizes.hidden
    attention = load.compute * (2 * sizes.queries + 2 * sizes.keys)
    if sizes.qk_norm:
        attention += (2 * FLOAT32) * (sizes.queries + sizes.keys)
    return residuals + inputs + attention + 4 * load.compute * sizes.inner


def _copies(sizes: DecoderSizes, load: UpdateLoad) -> float:
    if load.ranks == 1:
        return 0.0 if load.compute == load.master else sizes.layers * sizes.layer * load.compute
    # The current and the next layer, gathered; the full gradient of one layer, and its copy during reduce-scatter.
    layers = 2 * sizes.layer * load.compute + sizes.layer * (load.compute + FLOAT32)
    # Embedding and head, gathered in the master dtype until the backward ends; the term `head` has the head's gradient.
    outside = sizes.vocabulary * sizes.hidden * (1 if sizes.tied else 2)
    return layers + (2 * outside - sizes.vocabulary * sizes.hidden) * load.master


def _attention(sizes: DecoderSizes, load: UpdateLoad) -> float:
    if not load.cpu:
        channels = sizes.queries + 2 * sizes.keys
        # Output and its gradient, gradients of rows in both dtypes, and gradients of the packed tokens.
        rows = load.row_tokens * (2 * load.compute * sizes.queries + (load.compute + FLOAT32) * channels)
        return rows + 2 * FLOAT32 * load.tokens * channels
    keys = load.prompt + load.response
    row_scores, masks = sizes.heads * load.response * keys, load.rows * load.response * keys
    is_split = row_scores > BLOCK_SCORES and load.response > BLOCK_QUERIES
    if is_split:
        block = sizes.heads * keys * max(BLOCK_QUERIES, BLOCK_SCORES // (sizes.heads * keys))
    else:
        block = max(row_scores, min(BLOCK_SCORES, load.rows * row_scores))
    # Masks are kept for all layers, or computed per block from positions.
    mask = masks * FLOAT32 if masks <= MAX_SAVED_SCORES else block / sizes.heads * (FLOAT32 + 10)
    # The gradient of keys and values, accumulated over the blocks of a row.
    gradient_sums = 2 * load.rows * keys * sizes.keys * FLOAT32 if is_split else 0.0
    # Backward of a block: scores, probabilities and the gradients of both in float32, and rounded probabilities.
    return block * (4 * FLOAT32 + load.compute) + mask + gradient_sums
