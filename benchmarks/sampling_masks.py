"""Sampling masks of truncated sampling: how large they are, what storing them takes, and what leaving them out does.

    python benchmarks/sampling_masks.py [--models laboratory smollm2-135m-instruct] [--tokens 64]

For every truncation: how many ids a token was drawn from; bytes a token in a parquet file, for several forms of the
column (`runs/trajectories.py` has "steps"); and the mean ratio pi/mu of the sampled tokens, mu from the sampler
in float32, pi from the trainer in float32 with the sets and without. Without them every ratio is too small by the mass
of the set under pi: their mean is the mean kept mass, however exact the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shared import options_of
from trimtab.runs import trajectories
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Completion, Problem, Prompt, SamplingParams

TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_p": 0.95}, {"top_k": 20}, {"top_k": 50})
TEXTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue to a child.",
    "List some ideas for a birthday party.",
    "What is 17 plus 25? Think step by step.",
)
SAMPLES = 4


def main() -> None:
    options = options_of(__doc__, models=["laboratory", BUNDLED], tokens=64).parse_args()
    for name in options.models:
        small = name == "laboratory"
        loaded = load(str(laboratory_folder()) if small else name, dtype=torch.float32)
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32)
        prompts = _prompts(loaded.tokenizer, small)
        for truncation in TRUNCATIONS:
            if truncation.get("top_k", 0) < loaded.model.config.vocab_size:
                tokens = min(options.tokens, 11) if small else options.tokens
                sampling = SamplingParams(max_tokens=tokens, ignore_stop=True, **truncation)
                drawn = engine.generate(prompts, SAMPLES, sampling, seed=0)
                _report(name, truncation, loaded.model, prompts, [row for group in drawn for row in group])


def _prompts(tokenizer: Any, small: bool) -> list[Prompt]:
    if small:
        digits = np.random.default_rng(0).integers(0, 10, (16, 10))
        texts = ["".join(map(str, row)) + "=" for row in digits]
    else:
        texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS]
    return [Prompt(Problem(text, "", ""), text, np.array(tokenizer.encode(text))) for text in texts]


def _report(
    name: str, truncation: dict[str, Any], model: Any, prompts: Sequence[Prompt], rows: Sequence[Completion]
) -> None:
    sets = [ids for row in rows for ids in row.sampling_mask or ()]
    sizes = np.array([len(ids) for ids in sets])
    print(f"{name}, {', '.join(f'{key} {value}' for key, value in truncation.items())}: {len(sets)} tokens")
    print(f"  ids a token   mean {sizes.mean():.1f}, median {np.median(sizes):.0f}, largest {sizes.max()}")
    forms = {form: size / len(sets) for form, size in _sizes(rows, model.config.vocab_size).items()}
    print("  bytes a token " + ", ".join(f"{form} {size:.1f}" for form, size in forms.items()))
    batch = TokenBatch.pack(
        [prompt.ids for prompt in prompts],
        [row.response_ids for row in rows],
        [index // SAMPLES for index in range(len(rows))],
        pad_id=0,
    )
    packed = pack_kept([row.sampling_mask or () for row in rows], batch.response_ids.shape[1])
    behavior = torch.from_numpy(np.concatenate([row.logp_behavior for row in rows]))
    with torch.no_grad():
        inside, whole = (score(model, batch, kept=kept).logp[batch.response_mask] for kept in (packed, None))
    ratios = {"with sets": (inside - behavior).exp(), "without": (whole - behavior).exp()}
    said = ", ".join(
        f"{form} {ratio.mean():.6f} (furthest from 1: {_far(ratio):.1e})" for form, ratio in ratios.items()
    )
    print(f"  mean ratio    {said}; kept mass {(whole - inside).exp().mean():.6f}")


def _far(ratio: torch.Tensor) -> float:
    return float((ratio - 1).abs().max())


def _sizes(rows: Sequence[Completion], vocabulary: int) -> dict[str, int]:
    """Bytes of a compressed file that holds nothing but the sets."""
    narrow = np.min_scalar_type(vocabulary - 1)
    columns: dict[str, Any] = {
        "lists of int64": _lists(rows, np.dtype(np.int64)),
        f"lists of {narrow}": _lists(rows, narrow),
        "bit sets": pa.array([_bits(row, vocabulary) for row in rows], pa.binary()),
    }
    sizes = {form: len(trajectories.encode_table({"kept": column}, rows)) for form, column in columns.items()}
    return sizes | {"steps": len(trajectories.encode_table(trajectories.mask_columns(rows), rows))}


def _lists(rows: Sequence[Completion], dtype: np.dtype[Any]) -> pa.Array:
    return pa.array([[ids.astype(dtype) for ids in row.sampling_mask or ()] for row in rows])


def _bits(row: Completion, vocabulary: int) -> bytes:
    inside = np.zeros((len(row.sampling_mask or ()), vocabulary), dtype=np.bool_)
    for token, ids in enumerate(row.sampling_mask or ()):
        inside[token, ids] = True
    return np.packbits(inside, axis=1).tobytes()


if __name__ == "__main__":
    main()
