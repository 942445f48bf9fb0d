"""The interface through which an optional method takes part in training: the loop calls the hooks of all alike.

A method is a subclass of `Feature` in a separate file and a line in `build_features`. The calls of a step, in order:

    pack                  for each micro-batch, when the batch is packed
    proximal_passes       before the log-probs of the proximal policy are computed
    forward, after_score  around each forward of the policy or of the reference
    before_updates        before the first update, with the batch complete
    end_backward          before each update, with its gradient complete
    end_update            after each update
    after_updates         after the last update
    counts                after that
    end_step              when the metrics that every step has are known

Besides, `modules` is called when the optimizer is built, `publish_options` when engines get new weights, and `state`,
`tensors`, `load_state` and `load_tensors` for checkpoints. With several processes every hook is called on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from trimtab.objectives import Objective
from trimtab.trainer.config import Config
from trimtab.trainer.models.logprobs import TokenScores
from trimtab.trainer.packing import MicroBatch, MiniBatch
from trimtab.trainer.rollout.responses import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory

Purpose = Literal["proximal", "reference", "prepare", "train", "probe"]


class ForwardPass(NamedTuple):
    """One forward of a micro-batch.

    Its `purpose` is "proximal" or "reference": of these policies, before the updates; "prepare": of the current policy
    for the objective's state; "train": with a gradient; "probe": of the current policy without perturbation.
    """

    micro: MicroBatch  # may have no rows, where several processes must run the same number of forwards
    purpose: Purpose
    position: int = 0  # of the micro-batch in its mini-batch
    update: int = 0  # completed optimizer updates
    first_epoch: bool = False  # whether it is the first "train" pass over these rows
    measured: bool = False  # whether log-probs of this pass are compared with the sampler's


class ProximalPass(NamedTuple):
    """A pass over a mini-batch that scores its proximal policy."""

    weights: AbstractContextManager[None] = nullcontext()  # inside, the model has the weights of the policy
    # The tokens of a micro-batch that this pass scores: (rows, time) bool, on the CPU; None: all.
    tokens: Callable[[MicroBatch], Tensor] | None = None


class TrainedModule(NamedTuple):
    """A trained module of a feature. It is not sharded, its gradient is not clipped, and it has no weight decay."""

    module: nn.Module
    lr: float


class PolicyLearner(Protocol):
    """What features read of the learner."""

    config: Config
    objective: Objective

    def logp(self, micro: MicroBatch) -> Tensor:
        """Returns the log-probs (rows, time) of the current policy, without perturbation."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """A finished step."""

    step: int  # its number, from 1
    version: int  # completed optimizer updates before the step
    trajectories: Sequence[Trajectory]
    rollout: RolloutStats
    statistics: StepStatistics  # of the updates, over all processes


class Feature:
    """An optional part of training. Hooks that a method does not override do nothing.

    `perturbs_policy`: "train" passes are not of the policy itself, so that only probes measure the mismatch. `probes`:
    score every row once without perturbation in this step's updates.
    """

    perturbs_policy: bool = False
    probes: bool = False

    def modules(self) -> Mapping[str, TrainedModule]:
        """Modules to train, by the name of their section in a checkpoint."""
        return {}

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Returns the micro-batch with what this feature needs of its trajectories, in `MicroBatch.extras`."""
        return micro

    def proximal_passes(self, batch: MiniBatch, updates: int) -> Iterable[ProximalPass]:
        """Returns the passes that score the proximal policy after `updates` updates; none: one, of the current weights.

        Together they score every token. Ranks have the same mini-batch and must return the same passes.
        """
        return ()

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        """Returns a context for one forward. Its value holds keywords for `models.logprobs.score`."""
        return nullcontext({})

    def after_score(self, call: ForwardPass, scores: TokenScores) -> MicroBatch:
        """Returns the micro-batch for later passes, with what this pass adds. Not called without rows."""
        return call.micro

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        """Called before the first update of step `step` (from 1), with advantages and log-probs of fixed policies."""

    def end_backward(self) -> None:
        """Called before each update, with its gradient complete."""

    def end_update(self) -> None:
        """Called after each update. Raises `NonFiniteUpdateError` if it made this feature's parameters unusable."""

    def after_updates(self, learner: PolicyLearner) -> None:
        """Called after the last update of a step."""

    def counts(self) -> Mapping[str, int]:
        """What this process has counted since `before_updates`; sums over processes are `StepStatistics.counts`."""
        return {}

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns metrics of the step. Raises `TrimtabError` where the step broke a promise of the recipe."""
        return {}

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        """Keywords for `RolloutSource.publish`, called with the weights that are published."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Returns JSON values for a checkpoint, which has them under the name of this class."""
        return {}

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns sections of a checkpoint: tensors by name, of the same sections and names on every rank."""
        return {}

    def load_tensors(self, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restores `tensors()` from all sections of a checkpoint, which are gone later: copies them."""

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any]) -> None:
        """Restores `state()`."""
