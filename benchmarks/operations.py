"""Operations that one micro-batch and one optimizer step start on an accelerator, by kind. Needs no GPU.

    python benchmarks/operations.py                        # the table, about a minute
    python benchmarks/operations.py --rows dense --top 12  # with the commonest operations

An accelerator computes a small model faster than a processor starts its kernels, so their number decides the time. They
are counted on the pretended device of the tests, on which the trainer takes the paths that it takes on a GPU. Views
start nothing and are left out. A fused operation counts once, although PyTorch may start several kernels for it.

A model of Qwen2's or Qwen3's family with small sizes, 2 prompts of 16 tokens with 4 responses of 48 each, bfloat16
autocast over float32 weights. The columns: one layer (the difference of models with three and two), and all that is
outside of the layers (embedding, head, log-probs).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the pretended device

import numpy as np
import torch
from tests.support import pretended_device
from torch import nn
from torch.utils import _foreach_utils as foreach_utils
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.trainer.build_model import add_lora, use_fused_norms
from trimtab.trainer.config import load_config
from trimtab.trainer.models import packed_attention
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.matmul import reused_casts, use_fast_linear
from trimtab.trainer.models.perturbation import Perturbation
from trimtab.trainer.optim import build_optimizer, check_weights, clip_gradient
from trimtab.trainer.ranks import current_ranks

ROWS = ("dense", "lora", "noise", "mixture")
PARTS = ("forward", "backward", "optimizer")
KINDS = {
    "products": ("mm", "bmm", "addmm", "baddbmm", "linear", "_grouped_mm"),
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "casts, copies": ("_to_copy", "copy_", "clone", "cat", "stack", "index_copy", "index_copy_"),
    "fills": ("zeros", "ones", "fill_", "zero_", "zeros_like", "ones_like", "new_zeros", "new_full", "full", "arange"),
}
NO_KERNEL = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("detach", "_unsafe_view", "_local_scalar_dense"),
}


def starts_kernel(func: Any) -> bool:
    is_view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
    return not is_view and short_name(func) not in NO_KERNEL


def short_name(func: Any) -> str:
    return func._schema.name.split("::")[1]


def kind_of(name: str) -> str:
    if name.startswith(KINDS["attention"]):
        return "attention"
    return next((kind for kind, names in KINDS.items() if name in names), "others")


# PyTorch steps all parameters at once only for tensors of these types.
foreach_utils._foreach_supported_types.append(pretended_device.PretendedTensor)


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts operations by name, those of autograd's own threads included."""
    original: Callable[..., Any] = pretended_device._dispatch

    def counting(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if starts_kernel(func):
            counts[short_name(func)] += 1
        return original(func, args, kwargs)

    pretended_device._dispatch = counting
    try:
        yield
    finally:
        pretended_device._dispatch = original


def build(row: str, layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = "qwen3_moe" if row == "mixture" else "qwen2"
    if row == "mixture":
        sizes |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    config = AutoConfig.for_model(family, vocab_size=512, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=packed_attention.PACKED_IMPLEMENTATION)
    if row == "lora":
        model = add_lora(model, **load_config("quickstart", ["model.lora.rank=8"]).model.lora.model_dump())
    use_fast_linear(model.base_model)
    model = model.train().to(pretended_device.DEVICE)
    use_fused_norms(model)
    return model


def batch() -> TokenBatch:
    draw = np.random.default_rng(0)
    prompts, responses = list(draw.integers(512, size=(2, 16))), list(draw.integers(512, size=(8, 48)))
    return TokenBatch.pack(prompts, responses, [0] * 4 + [1] * 4, pad_id=0).to(pretended_device.DEVICE)


def count(row: str, layers: int) -> dict[str, Counter[str]]:
    """Operations of the second micro-batch, and of the optimizer step after it, by name."""
    model, tokens = build(row, layers), batch()
    noise = Perturbation(model, std=0.01) if row == "noise" else None
    optimizer = build_optimizer(model.parameters(), load_config("quickstart").optim)
    counts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    with reused_casts():
        for micro in range(2):
            measure = counted if micro else lambda _: nullcontext()
            with measure(counts["forward"]), noise.attached(seed=micro) if noise else nullcontext(), autocast():
                logp = score(model, tokens).logp
            with measure(counts["backward"]):
                logp.sum().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(2):
        with counted(counts["optimizer"]) if step else nullcontext():
            clip_gradient(parameters, 1.0, current_ranks())
            optimizer.step()
            check_weights(parameters, current_ranks())
    return counts


def autocast() -> Any:
    return torch.autocast(pretended_device.NAME, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--top", type=int, default=0, help="also the commonest operations of each row")
    arguments = parser.parse_args()
    kinds = [*KINDS, "others"]
    print(f"| model | part | {' | '.join(kinds)} | a layer | outside of the layers |")
    print(f"|---|---|{'---|' * len(kinds)}---|---|")
    for row in arguments.rows:
        two, three = count(row, 2), count(row, 3)
        for part in PARTS:
            layer, all_two = three[part] - two[part], two[part]
            by_kind = Counter[str]()
            for name, number in layer.items():
                by_kind[kind_of(name)] += number
            outside = all_two.total() - 2 * layer.total()
            cells = " | ".join(str(by_kind[kind]) for kind in kinds)
            print(f"| {row} | {part} | {cells} | **{layer.total()}** | {outside} |")
            if arguments.top:
                print("   ", ", ".join(f"{name} {number}" for name, number in layer.most_common(arguments.top)))


if __name__ == "__main__":
    main()
