"""Runs all checks of a pair and keeps what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.preflight import mismatch_checks as checks
from trimtab.preflight.engine_pair import Check, EnginePair, ScoredResponses
from trimtab.preflight.prefill_check import prefill
from trimtab.preflight.weight_checks import weights

TOKENS = 1024
"""Tokens that are sampled for each length, in 2 to 16 responses."""
CHECKS: Mapping[str, Callable[[EnginePair, Mapping[int, ScoredResponses]], Check]] = {
    "mismatch": checks.mismatch,
    "prefill": prefill,
    "distribution": checks.distribution,
    "batch sizes": checks.batch_sizes,
    "prefix cache": checks.prefix_cache,
    "sampling settings": checks.sampling_settings,
    "weights": weights,
    "end tokens": checks.end_tokens,
    "null update": checks.null_update,
}


@dataclass(frozen=True, eq=False)
class Preflight:
    """The result: checks in order, and the responses of each length that the first one measured."""

    facts: Mapping[str, str]
    bound: float
    checks: Sequence[Check]
    samples: Mapping[int, ScoredResponses]

    @property
    def ok(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        failed = [check.name for check in self.checks if check.status == "fail"]
        if failed:
            return f"not fit to train: {', '.join(failed)}"
        noted = [check.name for check in self.checks if check.status == "note"]
        return "fit to train" + (f"; see {', '.join(noted)}" if noted else "")

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "bound": self.bound,
            **self.facts,
            "lengths": {str(length): one.k3 for length, one in self.samples.items()},
            "checks": [asdict(check) for check in self.checks],
        }


def run(
    pair: EnginePair,
    lengths: Sequence[int],
    facts: Mapping[str, str],
    on_progress: Callable[[str], None],
    on_check: Callable[[Check], None] = lambda _: None,
) -> Preflight:
    """Publishes the trainer's weights and runs every check. A check that the engine refuses has failed.

    lengths: of responses in tokens; those beyond the context are shortened to it. on_progress: called with what is
    done next. on_check: called with each check when it has been made.
    """
    pair.publish()
    samples: dict[int, ScoredResponses] = {}
    for length in sorted({pair.room(pair.prompts, length) for length in lengths}):
        on_progress(f"responses of {length} tokens")
        prompts = pair.prompts[: max(2, min(16, TOKENS // length))]
        samples[length] = pair.compare(prompts, length)
    found: list[Check] = []
    for name, check in CHECKS.items():
        on_progress(name)
        try:
            found.append(check(pair, samples))
        except TrimtabError as error:
            found.append(Check("fail", name, str(error)))
        on_check(found[-1])
    return Preflight(facts, pair.bound, found, samples)
