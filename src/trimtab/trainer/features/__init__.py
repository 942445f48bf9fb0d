"""Optional parts of training; `build_features` lists them.

Each method has its own file; features that only add metrics are in `measurements`, those that end a run in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from trimtab.objectives import Objective
from trimtab.trainer.config import DISTILLATION, Config
from trimtab.trainer.features import checks, measurements
from trimtab.trainer.features.calibration import Calibration
from trimtab.trainer.features.feature import Feature
from trimtab.trainer.features.perturbation_feature import PerturbationFeature
from trimtab.trainer.features.proximal_policy import Snapshots
from trimtab.trainer.features.routing_replay import RoutingReplay, require_mixture
from trimtab.trainer.features.sampler_data import SamplingMask, TopLogprobs
from trimtab.trainer.ranks import RankGroup
from trimtab.trainer.rollout.canary import Canary


def build_features(
    config: Config,
    model: nn.Module,
    objective: Objective,
    canary: Canary | None,
    ranks: RankGroup,
    notify: Callable[[str], None],
) -> Iterator[Feature]:
    """Yields the features of a recipe. Hooks are called in this order.

    model: the trained model, sharded and with its adapters. notify: receives messages for the user.
    """
    yield SamplingMask()
    if objective.centering:
        yield TopLogprobs()
    if config.prefix is not None:
        yield measurements.PrefixMetrics()
    if config.task.name == "mixture":
        yield measurements.MixtureMetrics()
    if config.demonstrations is not None:
        yield measurements.DemonstrationMetrics()
    if config.advantage.kind == DISTILLATION:
        yield measurements.DistillationMetrics()
    if config.perturbation is not None:
        yield PerturbationFeature(config, model)
    if config.trainer.proximal == "snapshot" and "proximal" in objective.needs:
        yield Snapshots(config, model)
    yield measurements.PolicyKL(config, ranks)
    if config.routing.replay != "none":
        yield RoutingReplay(config.routing.replay, require_mixture(config, model))
    if config.has_engine_threads:
        yield measurements.LagMetrics()
    if canary is not None:
        yield checks.CanaryFeature(canary)
    if config.objective.calibrate:
        yield Calibration(config, notify)
    if config.numerics == "invariant":
        yield checks.BitwiseCheck(notify)
