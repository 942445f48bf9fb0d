"""A training step of a model of 1.5B parameters with random weights: seconds by phase, memory. For a GPU.

    python benchmarks/large_model.py --out runs/1.5b [--tokens 64 512] [--micro-batch-tokens 2048 8192]

writes the model (Qwen2.5-1.5B's shape, SmolLM2's tokenizer, 3 GB) to `--out` unless it is there, and steps it as
`benchmarks/trainer_step.py` does: 8 prompts x 8 completions of exactly so many tokens, one AdamW update in bfloat16
autocast. Against peers, with the same model:

    python benchmarks/generation.py --model runs/1.5b --cases 64x64
    python benchmarks/trainer_step.py --model runs/1.5b --tokens 512 --micro-batch-tokens 8192
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from trainer_step import Worker
from trimtab.trainer.models import bundled
from trimtab.trainer.models.load import default_device

SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
VOCABULARY = 151936
PHASES = ("collect", "update", "publish", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="of a completion")
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    given = parser.parse_args()
    if not (given.out / "tokenizer_config.json").exists():  # which is written last
        write_model(given.out, given.layers)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}")
    print("| tokens | micro-batch | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | GPU, GiB |")
    print("|" + "---|" * (3 + len(PHASES)))
    for tokens in given.tokens:
        for micro in given.micro_batch_tokens:
            variant = {"trainer": {"micro_batch_tokens": micro}}
            worker = Worker(sys.executable, "trimtab", str(given.out), tokens, variant)
            steps = [worker.step() for _ in range(1 + given.steps)][1:]
            worker.close()
            cells = " | ".join(middle([step[f"time/{phase}"] for step in steps]) for phase in PHASES)
            print(f"| {tokens} | {micro} | {cells} | {steps[-1]['gpu_peak'] / 2**30:.1f} |", flush=True)


def middle(seconds: list[Any]) -> str:
    """The median, with the range."""
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def write_model(out: Path, layers: int) -> None:
    config = Qwen2Config(
        **SHAPE,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in (("bos", 1), ("eos", 2), ("pad", 2))},
    )
    torch.manual_seed(0)
    with default_device():  # a CPU takes minutes for it
        model = Qwen2ForCausalLM(config)
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    torch.cuda.empty_cache()  # for the processes that are measured
    AutoTokenizer.from_pretrained(bundled.folder()).save_pretrained(out)


if __name__ == "__main__":
    main()
