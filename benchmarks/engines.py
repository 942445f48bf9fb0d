"""Tokens per second of vLLM beside the embedded engine, in this process and in one of its own; what publications cost.

    .venv-vllm/bin/python benchmarks/engines.py [--threads 2] [--rounds 5] [--compiled]

Both sample at temperature 1 from the same bfloat16 weights and prompts, 8 samples each, with forced length, and do all
of their usual work: seeds for each response, log-probs, text. No ratio is wanted: the embedded engine is made for this
size of model, vLLM for larger ones.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path

import torch

from generation import SAMPLES, case, make_prompts
from shared import alternate, medians, options_of
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.models.load import load
from trimtab.trainer.models.sharding import named_weights
from trimtab.types import Engine, SamplingParams

CASES = ((32, 48), (128, 48), (64, 256))
PROMPT_TOKENS = 128  # room for a prompt in vLLM's context


def main() -> None:
    parser = options_of(__doc__, model="smollm2-135m-instruct", threads=2, rounds=5, compiled=False)
    parser.add_argument("--cases", nargs="+", type=case, default=CASES, help="ROWSxTOKENS")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    loaded = load(options.model, dtype=torch.float32)
    eager = str(not options.compiled).lower()
    context = max(tokens for _, tokens in options.cases) + PROMPT_TOKENS
    config = load_config("quickstart-vllm", [f"engine.vllm.eager={eager}", f"engine.vllm.context={context}"]).engine
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "model"
        save_model_files(loaded.model, loaded.tokenizer, files)
        start = time.perf_counter()
        vllm = VllmEngine(files, loaded.tokenizer, config)
        print(f"vLLM starts in {time.perf_counter() - start:.1f} s, {options.threads} threads")
        embedded = load_config("quickstart", ["engine.dtype=bfloat16"])
        engines: dict[str, Engine] = {
            "embedded": EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16),
            "in a process": RemoteEngine(ProcessTransport(embedded, files, threads=options.threads)),
            "vLLM": vllm,
        }
        try:
            publications(engines, loaded.model, options.rounds)
            for rows, tokens in options.cases:
                prompts = make_prompts(loaded.tokenizer, rows // SAMPLES)
                sampling = SamplingParams(max_tokens=tokens, ignore_stop=True)
                runs = {
                    name: functools.partial(engine.generate, prompts, SAMPLES, sampling, seed=0)
                    for name, engine in engines.items()
                }
                report(rows, tokens, alternate(runs, options.rounds))
        finally:
            for engine in engines.values():
                engine.close()


def publications(engines: dict[str, Engine], model: torch.nn.Module, rounds: int) -> None:
    """All weights, float32 to bfloat16."""
    runs = {
        name: lambda engine=engine: engine.update_weights(named_weights(model), 0) for name, engine in engines.items()
    }
    for name, seconds in medians(alternate(runs, rounds)).items():
        print(f"  {name:16} publication {seconds:.2f} s", flush=True)


def report(rows: int, tokens: int, seconds: dict[str, list[float]]) -> None:
    print(f"{rows} rows x {tokens} tokens")
    median = medians(seconds)
    for name, taken in seconds.items():
        rounds = ", ".join(f"{s:.2f}" for s in taken)
        print(f"  {name:16} {rows * tokens / median[name]:7.0f} tokens/s   rounds {rounds} s")
    embedded, apart, vllm = median.values()
    print(
        f"  embedded, tokens/s relative to vLLM {vllm / embedded:.2f}; seconds in a process, relative to in this one ",
        end="",
    )
    print(f"{apart / embedded:.2f}", flush=True)


if __name__ == "__main__":
    main()
