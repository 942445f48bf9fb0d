"""The interface of optional training methods: hooks that the training loop calls for every feature.

A method is a subclass of `Feature` in a separate file and a line in `build_features`. The calls of a step, in order:

    pack                  for each micro-batch, when the batch is packed
    proximal_passes       before the log-probs of the proximal policy are computed
    forward, after_score  around each forward of the policy or of the reference
    before_updates        before the first update, with the batch complete
    end_update            after each update, while its gradient is still there
    after_updates         after the last update
    end_step              after the metrics that every step has are computed

Besides, `modules` is called when the optimizer is built, `publish_options` when engines get new weights, and `state`,
`tensors` and `load_state` for checkpoints. Every hook is called on every rank.
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
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory

Sections = Mapping[str, Mapping[str, Tensor]]
"""Sections of a checkpoint: tensors by name."""
Purpose = Literal["proximal", "reference", "prepare", "train", "probe"]


class ForwardPass(NamedTuple):
    """One forward of a micro-batch.

    Its `purpose` is "proximal" or "reference" if it scores that policy before the updates. The others run the current
    policy: "prepare" for the objective's state, "train" with a gradient, "probe" without perturbation.
    """

    micro: MicroBatch  # without rows if this rank has none left: all run equally many forwards
    purpose: Purpose
    position: int = 0  # of the micro-batch in its mini-batch
    update: int = 0  # completed optimizer updates
    first_epoch: bool = False  # whether it is the first "train" pass over these rows
    measured: bool = False  # whether log-probs of this pass are compared with the sampler's


class ProximalPass(NamedTuple):
    """A pass over a mini-batch that scores its proximal policy."""

    weights: AbstractContextManager[None] = nullcontext()  # gives the model the proximal policy's weights
    # Returns the tokens of a micro-batch that this pass scores, (rows, time) bool on the CPU. None: all tokens.
    tokens: Callable[[MicroBatch], Tensor] | None = None


class TrainedModule(NamedTuple):
    """A trained module of a feature. It is not sharded, its gradient is not clipped, and it has no weight decay."""

    module: nn.Module
    lr: float


class PolicyLearner(Protocol):
    """The part of the learner that features use."""

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

    `perturbs_policy`: "train" passes perturb the policy, so that only probes measure the mismatch. `probes`: updates of
    this step also score every row once without perturbation.
    """

    perturbs_policy: bool = False
    probes: bool = False

    def modules(self) -> Mapping[str, TrainedModule]:
        """Returns modules to train, by the name of their section in a checkpoint."""
        return {}

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Returns the micro-batch with what this feature needs of its trajectories, in `MicroBatch.extras`."""
        return micro

    def proximal_passes(self, batch: MiniBatch, updates: int) -> Iterable[ProximalPass]:
        """Returns the passes that score the proximal policy after `updates` updates. Default: one with current weights.

        The passes together score every token. All ranks get the same mini-batch and must return the same passes.
        """
        return ()

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        """Returns a context for one forward. Its value holds keywords for `models.logprobs.score`."""
        return nullcontext({})

    def after_score(self, call: ForwardPass, scores: TokenScores) -> MicroBatch:
        """Returns the micro-batch for later passes, with what this pass adds. Not called if there are no rows."""
        return call.micro

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        """Called before the first update of step `step` (from 1), with advantages and log-probs of fixed policies."""

    def end_update(self) -> None:
        """Called after each update. Raises `NonFiniteUpdateError` if it made this feature's parameters unusable."""

    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        """Returns this process's counts since `before_updates`; `StepStatistics.counts` are sums over processes."""
        return {}

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns metrics of the step. Raises `TrimtabError` if the step broke a guarantee of the recipe."""
        return {}

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        """Returns keywords for `RolloutSource.publish`. Called when `model` has the weights that are published."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Returns JSON values for a checkpoint, which stores them under the name of this class."""
        return {}

    def tensors(self) -> Sections:
        """Returns sections of a checkpoint: tensors by name, of the same sections and names on every rank."""
        return {}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any], sections: Sections) -> None:
        """Restores `state()`, and `tensors()` from all sections of a checkpoint, which must be copied: they end."""
