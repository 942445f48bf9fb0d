"""The assumptions of a plan, each with a default and its source; a plan prints all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from trimtab.errors import TrimtabError, did_you_mean


def _assumption(default: float, why: str, low: float = 0.0, high: float = float("inf")) -> float:
    return field(default=default, metadata={"why": why, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All numbers of a plan that are neither model sizes, device peaks, nor computed from them."""

    train_flops: float = _assumption(
        0.30,
        "share of the peak the trainer reaches, recomputation counted as work; torchtitan reports .33 for Llama 3.1 8B "
        "under FSDP2 without compilation on 8 H100 (benchmarks/llama3_h100_202412_torchtitan.md)",
        high=1,
    )
    decode_bandwidth: float = _assumption(0.60, "share of the memory bandwidth decoding reaches; a guess", high=1)
    decode_flops: float = _assumption(
        0.40, "share of the peak that prefill and large decode batches reach; a guess", high=1
    )
    decode_overhead: float = _assumption(
        0.005, "seconds of every decode step spent outside the GPU's products; a guess (engine.vllm.eager costs more)"
    )
    parallel: float = _assumption(
        0.90,
        "share of an engine's speed per GPU that remains with every doubling of its GPUs (tensor parallel); a guess",
        high=1,
    )
    engine_memory: float = _assumption(0.90, "share of an engine's GPU it may use; vLLM's own default", high=1)
    engine_workspace: float = _assumption(4e9, "bytes of an engine's GPU that hold neither weights nor keys; a guess")
    sequences: float = _assumption(256, "responses an engine decodes at once at most (vLLM's max_num_seqs)", low=1)
    train_memory: float = _assumption(
        0.92, "share of a trainer's GPU that tensors may fill; the rest is CUDA and gaps", high=1
    )
    handover: float = _assumption(
        2e9, "bytes per second at which the trainer writes its weights and each engine reads them (float32); a guess"
    )
    score: float = _assumption(0.0, "seconds of rewards for one batch")


def parse_assumptions(changes: Iterable[str]) -> Assumptions:
    """Returns the defaults with `name=value` changes.

    Raises `TrimtabError` for an unknown name or a value out of bounds.
    """
    known = {entry.name: entry for entry in fields(Assumptions)}
    values: dict[str, float] = {}
    for change in changes:
        name, equals, raw = change.partition("=")
        if not equals:
            raise TrimtabError(f"--assume {change!r}: write it as name=value")
        if name not in known:
            raise TrimtabError(f"--assume: unknown assumption {name!r}{did_you_mean(name, known)}")
        try:
            values[name] = float(raw)
        except ValueError:
            raise TrimtabError(f"--assume {change!r}: {raw!r} is not a number") from None
        low, high = known[name].metadata["low"], known[name].metadata["high"]
        positive = name == "score" or values[name] > 0
        if not (math.isfinite(values[name]) and low <= values[name] <= high and positive):
            raise TrimtabError(f"--assume {change!r}: it must be above {low:g} and at most {high:g}")
    return replace(Assumptions(), **values)


def assumption_reasons() -> dict[str, str]:
    """Returns the reason for each default by name."""
    return {entry.name: entry.metadata["why"] for entry in fields(Assumptions)}


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
