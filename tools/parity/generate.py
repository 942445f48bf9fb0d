"""Freeze what the peers compute, so that the parity tests need none of them.

    python tools/parity/generate.py [--miles CHECKOUT] [--prime-rl CHECKOUT] [--areal CHECKOUT] [--hooks FOLDER]
        [--newer FOLDER]

Runs in an environment that holds verl and TRL (`make bench-install`). Every peer runs its own code on the same
seeded batches; inputs are float32 numbers, and the arithmetic is float64, so that what is frozen is the peer's
formula and not its rounding; tensors are then stored as float32 (6e-8). Written into `tests/parity/frozen`:

    inputs.safetensors    the batches, tensor names `batch/field`
    PEER.safetensors      the peer's tensors, names `case/batch/field`
    PEER.json             versions, the call of every case, the peer's scalars

Only numbers are stored; no code of a peer is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FROZEN = Path(__file__).parents[2] / "tests" / "parity" / "frozen"
Batch = dict[str, torch.Tensor]


@dataclass
class Recording:
    """Collects the results of one peer."""

    versions: dict[str, str]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, case: str, batch: str, call: dict[str, Any], **results: Any) -> None:
        """Keep one result. Tensors with elements go to safetensors, scalars and strings to JSON."""
        entry = self.cases.setdefault(case, {"call": call, "scalars": {}})
        scalars = entry["scalars"].setdefault(batch, {})
        for key, value in results.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                kind = torch.float32 if value.is_floating_point() else value.dtype
                self.tensors[f"{case}/{batch}/{key}"] = value.detach().to(kind).contiguous()
            else:
                number = value.item() if isinstance(value, torch.Tensor) else value
                # JSON has no NaN; `float()` reads the word back
                scalars[key] = str(number) if isinstance(number, float) and not math.isfinite(number) else number

    def write(self, peer: str) -> None:
        save_file(self.tensors, FROZEN / f"{peer}.safetensors")
        document = {"versions": self.versions, "cases": self.cases}
        (FROZEN / f"{peer}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def lengths_to_mask(lengths: list[int], time: int) -> torch.Tensor:
    return torch.arange(time)[None, :] < torch.tensor(lengths)[:, None]


def random_batch(seed: int, lengths: list[int], time: int, mismatch: float, drift: float, sequence: float) -> Batch:
    """Three policies, `mismatch` (proximal/behavior) and `drift` (current/proximal) nats a token apart.

    `sequence` adds a common shift to every token of a row, so that geometric rules have something to find.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), time)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    behavior = -torch.empty(shape).exponential_(1.0, generator=generator) - 0.05
    proximal = behavior + mismatch * normal(*shape) + sequence * normal(shape[0], 1)
    current = proximal + drift * normal(*shape)
    rewards = torch.randint(0, 2, (shape[0],), generator=generator).float() + 0.25 * normal(shape[0]).round()
    advantage = normal(shape[0], 1)
    advantage[0] = 0.0
    return {
        "behavior": behavior.clamp(max=-1e-3),
        "proximal": proximal.clamp(max=-1e-3),
        "current": current.clamp(max=-1e-3),
        "reference": (current + 0.1 * normal(*shape)).clamp(max=-1e-3),
        "entropy": torch.empty(shape).exponential_(1.0, generator=generator),
        "mask": lengths_to_mask(lengths, time),
        "advantage": advantage,
        "rewards": rewards,
        "groups": torch.arange(shape[0]) // 4,
    }


def make_batches() -> dict[str, Batch]:
    mild = random_batch(0, [24, 20, 17, 24, 9, 24, 13, 5], 24, mismatch=0.02, drift=0.02, sequence=0.004)
    heavy = random_batch(1, [24, 22, 24, 11, 24, 6, 18, 24], 24, mismatch=0.45, drift=0.35, sequence=0.08)
    heavy["proximal"][2, 7] = heavy["behavior"][2, 7] - 11.0  # one catastrophic token, for the veto
    ragged = random_batch(2, [40, 1, 33, 2, 12, 40, 27, 3, 19, 8, 40, 5], 40, mismatch=0.15, drift=0.12, sequence=0.03)
    holes = torch.rand(ragged["mask"].shape, generator=torch.Generator().manual_seed(3)) < 0.25
    holes[:, 0] = False
    ragged["mask"] &= ~holes  # tool output between model tokens
    ragged["rewards"][4:8] = 1.0  # a group without signal
    empty = random_batch(4, [16, 9, 16, 12], 16, mismatch=0.1, drift=0.1, sequence=0.05)
    empty["mask"][1] = False  # a row without a single trained token
    bounds = random_batch(5, [5, 5, 5, 5], 5, mismatch=0.0, drift=0.1, sequence=0.0)
    shift = torch.tensor([0.9995, 1.0005, 0.995, 1.005]).log()[:, None]
    bounds["proximal"] = bounds["behavior"] + shift  # rows whose every ratio is exactly this
    return {"mild": mild, "heavy": heavy, "ragged": ragged, "empty": empty, "bounds": bounds}


def for_peer(batch: Batch) -> Batch:
    """float64 arithmetic on the float32 numbers; zeros where masked, as peers expect finite padding."""
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    for key in ("behavior", "proximal", "current", "reference", "entropy"):
        wide[key] = torch.where(batch["mask"], wide[key], 0.0)
    return wide


def with_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], logp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scalar loss and its gradient in the log-probs it was given."""
    leaf = logp.detach().clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def each(batches: dict[str, Batch], *names: str) -> Iterator[tuple[str, Batch]]:
    for name in names or ("mild", "heavy", "ragged"):
        yield name, for_peer(batches[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miles", type=Path, help="a checkout of Miles; without it its file stays as it is")
    parser.add_argument("--prime-rl", type=Path, help="a checkout of prime-rl, with its commit in the file COMMIT")
    parser.add_argument("--areal", type=Path, help="a checkout of AReaL, with its commit in the file COMMIT")
    parser.add_argument("--hooks", type=Path, help="a folder of checkouts (from_hooks.py); only these are frozen")
    parser.add_argument("--newer", type=Path, help="a folder of files (from_newer_files.py); only these are frozen")
    arguments = parser.parse_args()
    if arguments.hooks is not None:
        import from_hooks

        from_hooks.record(make_batches(), arguments.hooks).write("hooks")
        return
    if arguments.newer is not None:
        import from_newer_files

        from_newer_files.record(make_batches(), arguments.newer).write("newer")
        return

    import from_trl
    import from_verl

    FROZEN.mkdir(exist_ok=True)
    batches = make_batches()
    save_file(
        {f"{name}/{key}": value for name, batch in batches.items() for key, value in batch.items()},
        FROZEN / "inputs.safetensors",
    )
    from_verl.record(batches).write("verl")
    from_trl.record(batches).write("trl")
    if arguments.prime_rl is not None:
        import from_prime_rl

        from_prime_rl.record(batches, arguments.prime_rl).write("prime-rl")
    if arguments.areal is not None:
        import from_areal

        from_areal.record(batches, arguments.areal).write("areal")
    if arguments.miles is not None:
        import from_miles

        from_miles.record(batches, arguments.miles).write("miles")


if __name__ == "__main__":
    main()
