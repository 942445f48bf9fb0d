"""Correction and mismatch statistics of a large batch, against verl's helper in the same process.

    make bench                                 (or: python benchmarks/corrections.py, where verl is installed)

Both sides get the same (1024, 2048) float32 log-probs and do the same work: token weights truncated at 2, a geometric
band of [0.99, 1.01], and every metric verl's helper returns, down to Python floats; those that `trimtab.correct` does
not return (perplexities, spread of weights and of their sequence means) are computed from its results, and timed with
it. Ours has quantiles, Pearson and ESS at two levels on top. Runs alternate, so that a busy machine slows both alike.

Memory is what `trimtab.correct` with its report takes above its inputs, results included: the most live tensor
bytes from the allocator's own events (`torch.profiler`, profile_memory), in units of one (1024, 2048) float32 tensor;
and, as a cross-check, the rise of a fresh process's resident high-water mark (VmHWM) during the call.

The time includes the page faults of new memory, of which verl's 13 tensors need more. Without them:

    MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1073741824 make bench

Targets: at least 3x faster, at most 4 tensors, cost linear in tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

import trimtab
from shared import alternate, medians, options_of, reset_peak, resident

TIME = 2048
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batch(rows: int, columns: int) -> Tensors:
    """Log-probs as bf16 rollouts leave them, responses of log-normal length with a few cut by the limit."""
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.empty(rows, columns).exponential_(2.0, generator=generator)
    proximal = behavior + 0.02 * torch.randn(rows, columns, generator=generator)
    lengths = (900 * torch.empty(rows, 1).log_normal_(0.0, 0.7, generator=generator)).clamp(1, columns)
    mask = torch.arange(columns)[None, :] < lengths
    return torch.where(mask, proximal, 0.0), torch.where(mask, behavior, 0.0), mask


def alone(proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Weight, keep and the mismatch report as Trimtab gives them."""
    corrected = trimtab.correct(
        proximal,
        behavior,
        mask,
        weight=trimtab.Weight("token", "truncate", max=2.0),
        masks=[trimtab.Band("geometric", 0.99, 1.01)],
    )
    return corrected.weight, corrected.metrics.finalize()


def ours(proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    weight, result = alone(proximal, behavior, mask)
    return result | what_verl_adds(proximal, behavior, mask, weight)


def what_verl_adds(
    proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> dict[str, float]:
    """verl's metrics of which `correct` has no counterpart. Padding holds zeros here, so plain sums are masked sums."""
    lengths = mask.sum(dim=1).clamp(min=1)
    tokens = lengths.sum()
    train, rollout, by_row = (rows.sum(dim=1) / lengths for rows in (proximal, behavior, weight))
    gap = rollout - train  # minus the log geometric ratio, which the band judges
    square = weight.square().sum() / tokens
    mean = weight.sum() / tokens
    lowest = torch.where(mask, weight, torch.inf).min()
    result = {
        "ppl/train": (-train).exp().mean(),
        "ppl/rollout": (-rollout).exp().mean(),
        "ppl/log_train": -train.mean(),
        "ppl/log_rollout": -rollout.mean(),
        **_spread("ppl/log_diff", gap),
        "ppl/log_diff_abs": gap.abs().mean(),
        "weight/std": (square - mean.square()).clamp(min=0).sqrt(),
        "weight/ess": mean.square() / square,
        "weight/max": weight.max(),
        "weight/min": lowest,
        **_spread("weight/row", by_row),
        "weight/row_deviation": (by_row - 1).abs().max(),
        "weight/row_high": (by_row > 2.0).float().mean(),
        "weight/row_low": (by_row < 0.5).float().mean(),
        "band/high": (gap < -0.00995).float().mean(),
        "band/low": (gap > 0.01005).float().mean(),
        "band/deviation": gap.abs().max(),
    }
    values = torch.stack(list(result.values())).tolist()
    return dict(zip(result, values, strict=True))


def _spread(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    low, high = values.aminmax()
    return {f"{name}_mean": values.mean(), f"{name}_std": values.std(), f"{name}_min": low, f"{name}_max": high}


def verls(proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(
        proximal,
        behavior,
        mask,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.99_1.01",
    )[2]


def bare(proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> float:
    """The least anyone could do: one difference, one exp, one masked sum."""
    return torch.where(mask, (proximal - behavior).exp(), 0.0).sum().item()


def page_faults(work: Callable[[], object]) -> int:
    """The median over five calls."""
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return int(statistics.median(counts))


def peak_live_bytes(work: Callable[[], object]) -> int:
    """Highest sum of live allocations made inside `work`, from the allocator's events."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    live = highest = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


def resident_rise(side: str, rows: int) -> int:
    """Bytes by which the resident high-water mark of a fresh process rises during one call (Linux)."""
    command = [sys.executable, __file__, "--resident", side, "--rows", str(rows)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(shown.splitlines()[-1])


def _print_resident_rise(side: str, rows: int) -> None:
    work = {"ours": alone, "verl": _verl_side}[side]
    work(*make_batch(8, 64))  # imports and first-call costs are not the batch's
    batch = make_batch(rows, TIME)
    ctypes.CDLL(None).malloc_trim(0)  # what making the batch left in the heap would hide what the call takes
    reset_peak()
    before = resident()
    work(*batch)
    print(json.dumps(resident(peak=True) - before))


def _verl_side(proximal: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    return verls(proximal, behavior, mask.float())


def main() -> None:
    parser = options_of(__doc__, rounds=15, rows=1024)
    parser.add_argument("--resident", choices=["ours", "verl"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        import verl  # noqa: F401
    except ImportError:
        raise SystemExit("verl is not installed here: `make bench-install` makes an environment that has it") from None
    if arguments.resident:
        _print_resident_rise(arguments.resident, arguments.rows)
        return

    batch = make_batch(arguments.rows, TIME)
    proximal, behavior, mask = batch
    as_float = (proximal, behavior, mask.float())  # what verl is fastest with
    tensor = proximal.nbytes
    trained = f"{mask.float().mean():.0%} trained"
    print(f"batch ({arguments.rows}, {TIME}) float32, {trained}, {torch.get_num_threads()} threads")

    sides = {
        "ours": lambda: ours(*batch),
        "verl": lambda: verls(*as_float),
        "correct alone": lambda: alone(*batch),
        "bare pass": lambda: bare(*batch),
    }
    seconds = alternate(sides, arguments.rounds)
    ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds["verl"], strict=True))
    middle = medians(seconds)
    shown = "  ".join(f"{name} {taken * 1e3:.1f} ms" for name, taken in middle.items())
    print(f"time      {shown}   (medians of {arguments.rounds}, interleaved)")
    speed = middle["verl"] / middle["ours"]
    print(f"speed     {speed:.2f}x verl  (range {ratios[0]:.2f} .. {ratios[-1]:.2f}; target >= 3)")
    faults = [page_faults(sides[side]) for side in ("ours", "verl")]
    print(f"faults    ours {faults[0]:,}  verl {faults[1]:,} pages a call")

    live = peak_live_bytes(sides["correct alone"]) / tensor
    live_verl = peak_live_bytes(sides["verl"]) / tensor
    print(f"memory    ours {live:.2f} tensors  verl {live_verl:.2f}   (peak live bytes; target <= 4)")
    rises = {side: resident_rise(side, arguments.rows) / tensor for side in ("ours", "verl")}
    print(f"resident  ours {rises['ours']:.2f} tensors  verl {rises['verl']:.2f}")

    parts = {str(part): make_batch(arguments.rows // part, TIME) for part in (1, 2, 4)}
    works = {name: functools.partial(alone, *part) for name, part in parts.items()}
    whole, half, quarter = medians(alternate(works, arguments.rounds)).values()
    print(f"linear    half the rows {half / whole:.2f}, a quarter {quarter / whole:.2f} of the time (ideal 0.50, 0.25)")
    print(f"metrics   ours {len(ours(*batch))}, verl {len(verls(*as_float))}")


if __name__ == "__main__":
    main()
