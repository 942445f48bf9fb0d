"""The training loop. All state of a run belongs to `Trainer`; everything else is a function.

    take a batch -> proximal log-probs -> advantages -> mini-batch updates -> publish weights

Batches come from a `RolloutSource`, synchronous or asynchronous. Time is counted in optimizer updates: a step consumes
one batch, and weights are published once at least `sync_every` updates have passed since the last publication.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from trimtab.config import Config
from trimtab.corrections import finite_rows
from trimtab.engines.factory import weight_quantization
from trimtab.errors import DivergedError, Stopped, TrimtabError
from trimtab.models.lora import named_weights
from trimtab.objectives import advantages
from trimtab.rollout.canary import Canary
from trimtab.rollout.collector import Collector, Group, RolloutStats
from trimtab.rollout.source import RolloutSource
from trimtab.runs import trajectories
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import best_checkpoint, checkpoint_folder
from trimtab.training.batching import micro_batches, split_minibatches, to_tensors
from trimtab.training.checkpoint import snapshot, store
from trimtab.training.features.bitwise_check import confirm
from trimtab.training.features.calibration import calibrate
from trimtab.training.features.length_surge import LengthSurge
from trimtab.training.held_out import HeldOut
from trimtab.training.idle import Idle, reason
from trimtab.training.learner import Learner, MiniBatch, NonFiniteUpdateError
from trimtab.training.observer import Moment, Observer
from trimtab.training.optim import surge_share
from trimtab.training.ranks import here
from trimtab.training.refusals import is_async
from trimtab.training.sinks import Sink
from trimtab.training.step_metrics import (
    batch_metrics,
    beside_metrics,
    collect_metrics,
    expert_metrics,
    perturbation_metrics,
    prefix_metrics,
    routing_metrics,
    speed_metrics,
    update_metrics,
)
from trimtab.training.step_statistics import StepStatistics
from trimtab.training.stop import Stop
from trimtab.types import Engine, Trajectory

NOTHING_CONFIRMED = (
    "caution: no token of this batch was sampled under the weights it is trained with, so numerics = "
    '"invariant" was not confirmed (mismatch/confirmed)'
)
LAGGING = (
    "caution: this first batch is fresh, later ones are up to {} updates older and will be rejected far more often; "
    "take bounds from a run's own trajectories instead (trimtab diagnose)"
)


@dataclass
class Batch:
    """What one step trains on: trajectories in order, and the same as scored mini-batches with advantages."""

    trajectories: list[Trajectory]
    minibatches: list[MiniBatch]
    advantages: torch.Tensor
    dropped: int


@dataclass
class Trainer:
    """One run. `step` counts finished steps; `learner.updates` is the clock the policies are dated with."""

    config: Config
    feed: RolloutSource
    learner: Learner
    run: RunDirectory
    observer: Observer
    surge: LengthSurge | None = None
    canary: Canary | None = None
    sinks: Sequence[Sink] = ()
    stop: Stop = field(default_factory=Stop)
    idle: Idle = field(default_factory=Idle)
    opening: dict[str, float] = field(default_factory=dict)  # what was measured ahead of the first step
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def collector(self) -> Collector:
        return self.feed.collector

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut.of(self.collector)

    def train(self) -> dict[str, Any]:
        """Run to the last step and return its metrics. On divergence the error names the last good checkpoint."""
        logged = self.run.metrics()  # a resumed run may already be complete
        metrics: dict[str, Any] = logged[-1] if logged else {}
        before: dict[str, float] = {}
        if self.step == 0:
            self._publish(force=True)
            before = self._evaluate("before")
        with self.stop.finishing():
            while self.step < self.config.trainer.steps:
                self._stop_if_asked()
                metrics = self._one_step(before)
                before = {}
        return metrics

    def _stop_if_asked(self) -> None:
        """End the run between two steps if any rank was asked for it, with a checkpoint of this moment."""
        asked = int(here().most(self.stop.asked or 0))
        if not asked:
            return
        if self.step:
            self._save()
            self.observer.message(f"stopped after step {self.step}, which is saved")
        raise Stopped(asked)

    def _one_step(self, before: dict[str, float]) -> dict[str, Any]:
        """One batch. `before` is the held-out result ahead of the first update; it is logged with the first step."""
        start = time.perf_counter()
        version = self.learner.updates
        self.observer.phase("collect", self.step, self.config.trainer.steps)
        groups, collected = self.feed.take(version, self.config.trainer.steps - self.step)
        batch = self._prepare_batch(groups)
        calibrated = self._calibrate(batch)
        stats = self._update(batch)
        confirmed = confirm(batch.trajectories, stats) if self.config.numerics == "invariant" else None
        if confirmed == 0 and self.step == 0:
            self.observer.message(NOTHING_CONFIRMED)
        self._publish()
        self.step += 1
        self.seconds["step"] = time.perf_counter() - start

        metrics = self._metrics(batch, collected, stats, version)
        metrics |= self.opening if self.step == 1 else {}
        told = None
        if not self.learner.objective.learns_without_advantage:
            told = self.idle.observe(batch.trajectories, batch.advantages, self.collector.sampling.max_tokens)
        metrics |= calibrated | self._watch_lengths(metrics.get("length/mean"))
        metrics |= {} if confirmed is None else {"mismatch/confirmed": confirmed}
        metrics |= before | {
            f"{key.removesuffix('/greedy')}/before": value for key, value in before.items() if key.endswith("/greedy")
        }
        measured: dict[str, float] = {}
        if self._due(self.config.eval.every):
            measured = self._evaluate("after" if self.step == self.config.trainer.steps else self.step)
        self._write(batch, stats, metrics | measured, measured)
        for error in dict.fromkeys(collected.errors):
            self.observer.message(error)
        if told is not None:
            self.observer.message(f"step {self.step}: {told}")
        self._stop_if_idle(batch)
        return metrics | measured

    def _stop_if_idle(self, batch: Batch) -> None:
        """End a run that goes on without learning; its last step is saved, and resuming it goes on counting."""
        limit = self.config.trainer.max_idle_steps
        if limit and self.idle.steps >= limit and self.step < self.config.trainer.steps:
            self._save()
            why = reason(batch.trajectories, self.collector.sampling.max_tokens)
            raise TrimtabError(
                f"{self.idle.steps} steps in a row taught nothing, in the last one {why}; step {self.step} is saved: "
                "look at the reward and the responses, or raise trainer.max_idle_steps (0: never stop)"
            )

    def _prepare_batch(self, groups: Sequence[Group]) -> Batch:
        """Pack, score what stays constant, drop bad data, and only then compute advantages over whole groups."""
        rows = [trajectory for group in groups for trajectory in group]
        dropped = 0
        while True:
            start = time.perf_counter()
            minibatches = self.learner.score_constants(self._pack(rows))
            self.seconds["proximal"] = time.perf_counter() - start
            bad = _non_finite(minibatches)
            if not bad:
                break
            dropped += len(bad)
            rows = [trajectory for index, trajectory in enumerate(rows) if index not in bad]
        kind = self.config.advantage.kind or self.learner.objective.advantage
        rewards = torch.tensor([t.reward for t in rows], dtype=torch.float64)
        owners = torch.tensor([t.group for t in rows], dtype=torch.long)
        beta = {"value_beta": self.config.advantage.value_beta} if kind == "optimal" else {}
        values = advantages(kind, rewards, owners, **beta).float() if rows else rewards.view(0, 1).float()
        for minibatch in minibatches:
            for index, micro in enumerate(minibatch):
                chosen = values[list(micro.rows)].to(self.learner.device)
                minibatch[index] = micro.with_scores(advantage=chosen)
        return Batch(rows, minibatches, values, dropped)

    def _calibrate(self, batch: Batch) -> dict[str, float]:
        """Bounds from the first batch of a run that asks for it; a resumed run has them already."""
        if not self.config.objective.calibrate or self.learner.bounds is not None:
            return {}
        found = calibrate(self.learner, batch.minibatches)
        trainer = self.config.trainer
        lag = max(trainer.max_lag or 0, (trainer.sync_every or 1) - trainer.minibatches * trainer.epochs)
        cautions = [LAGGING.format(lag)] if lag > 0 else []
        for line in (found.line, *cautions, *self.learner.objective.equation().splitlines()):
            self.observer.message(line)
        return found.metrics()

    def _pack(self, rows: Sequence[Trajectory]) -> list[MiniBatch]:
        owned: dict[int, list[int]] = {}
        for index, trajectory in enumerate(rows):
            owned.setdefault(trajectory.group, []).append(index)
        trainer, pad_id = self.config.trainer, self.collector.stream.pad_id
        recorded = self.learner.experts if self.config.routing.replay == "rollout" else None
        return [
            [
                to_tensors(rows, chosen, pad_id, self.learner.device, recorded)
                for chosen in micro_batches(rows, part, trainer.micro_batch_tokens)
            ]
            for part in split_minibatches(list(owned.values()), trainer.minibatches)
        ]

    def _update(self, batch: Batch) -> StepStatistics:
        start = time.perf_counter()
        if self.surge is not None:
            self.learner.share = surge_share(self.surge.config, self.step + 1, self.surge.step)
        try:
            return self.learner.update(
                batch.minibatches, lambda done, of: self.observer.phase("update", done, of), probe=self._probes
            )
        except NonFiniteUpdateError as error:
            if error.weights_are_good:
                self._save()
            good = self.run.checkpoints()
            where = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint was written yet"
            raise DivergedError(f"{error}; {where}: {error.advice}") from None
        finally:
            self.seconds["update"] = time.perf_counter() - start

    def _publish(self, *, force: bool = False) -> None:
        start = time.perf_counter()
        every, version = self.config.trainer.sync_every or 1, self.learner.updates
        if force or version - self.feed.published >= every:
            self.publish_now()
        self.seconds["publish"] = time.perf_counter() - start

    def publish_now(self) -> None:
        """Give the engines the policy as it is, and the canary what it must look like there."""
        version = self.learner.updates
        expected = None if self.canary is None else self.canary.expect(self.learner.model, version)
        self.feed.publish(self.current_weights(), version, expected)

    def current_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self.learner.model)

    @property
    def _probes(self) -> bool:
        """Whether the step in progress also looks at the clean policy: the first, the last, and every so many."""
        number, every = self.step + 1, self.config.diagnose.every
        return number in (1, self.config.trainer.steps) or number % every == 0

    def _due(self, every: int) -> bool:
        return self.step == self.config.trainer.steps or bool(every and self.step % every == 0)

    def _metrics(self, batch: Batch, collected: RolloutStats, stats: StepStatistics, version: int) -> dict[str, Any]:
        """Everything `docs/metrics.md` promises for a step."""
        self.seconds |= {"collect": collected.seconds_generating, "score": collected.seconds_scoring}
        return {
            "step": self.step,
            "updates": self.learner.updates,
            "policy_version": self.feed.published,
            **batch_metrics(batch.trajectories, version),
            **collect_metrics(collected, dropped=batch.dropped),
            **update_metrics(
                stats,
                anchor=self.learner.anchor_name,
                grad_clip=self.config.optim.grad_clip,
                ranks=self.learner.ranks.size,
            ),
            **self._method_metrics(batch, collected, stats, version),
            **speed_metrics(self.seconds, collected.response_tokens, stats.tokens),
        }

    def _watch_lengths(self, length: float | None) -> dict[str, float]:
        """Before anything is written: the checkpoint of this step must know what was seen in it."""
        if self.surge is None:
            return {}
        if line := self.surge.observe(self.step, length):
            self.observer.message(line)
        return {} if self.surge.step is None else {"optim/surge_step": self.surge.step}

    def _method_metrics(
        self, batch: Batch, collected: RolloutStats, stats: StepStatistics, version: int
    ) -> dict[str, float]:
        """What only runs with prompts that are too long, prefixes, external traces, noise, replayed routing or
        calibrated bounds have to say."""
        found = dict[str, float]()
        if replaced := self.collector.stream.newly_replaced():
            found["prompt/dropped"] = replaced
        if self.collector.prefixes is not None:
            found |= prefix_metrics(batch.trajectories, version)
        if self.collector.experts is not None:
            found |= expert_metrics(collected)
        if self.learner.perturbation is not None:
            found |= perturbation_metrics(self.learner.perturbation, stats)
        if self.learner.experts is not None:
            found |= routing_metrics(batch.trajectories, stats)
        if is_async(self.config):
            found |= beside_metrics(batch.trajectories, collected, version)
        if self.canary is not None:
            found |= self.canary.metrics()
        if self.learner.bounds is not None:
            found |= {f"calibrate/{name}": bound for name, bound in self.learner.bounds.items()}
        return found

    def _evaluate(self, moment: Moment) -> dict[str, float]:
        """Held-out greedy accuracy of the trainer's current policy, in the engine's dtype but neither quantized nor
        noisy; the sampler's own weights are put back after."""
        task = self.collector.stream.task

        def through(engine: Engine) -> tuple[float, int]:
            return self.held_out.measure(engine, self.collector)

        rounded = weight_quantization(self.config).active
        accuracy, problems = self.feed.look(self.current_weights(), self.learner.updates, through, rounded=rounded)
        self.observer.evaluated(task.name, moment, accuracy)
        return {f"eval/{task.name}/greedy": accuracy, f"eval/{task.name}/problems": problems}

    def _write(
        self, batch: Batch, stats: StepStatistics, metrics: dict[str, Any], measured: Mapping[str, float]
    ) -> None:
        """Writes files before it calls the observer: what a display shows is already on disk."""
        every = self.config.log.trajectories_every
        if self.run.writes and every and self.step % every == 0:
            trajectories.write(self.run.trajectory_file(self.step), self._rows(batch, stats), self.step)
        self.run.log(metrics)
        if self._due(self.config.checkpoint.every) or self._improved(measured):
            self._checkpoint(measured)
        for sink in self.sinks:
            sink.log(self.step, metrics)
        self.observer.step(metrics)

    def _rows(self, batch: Batch, stats: StepStatistics) -> list[trajectories.Row]:
        """Trajectories with their advantage and the log-probs the mismatch was measured against."""
        proximal = self.learner.anchor_name == "proximal"
        return [
            trajectories.Row(
                trajectory,
                logp_proximal=stats.anchors.get(index) if proximal else None,
                logp_current=None if proximal else stats.anchors.get(index),
                logp_perturbed=stats.perturbed.get(index),
                advantage=float(batch.advantages[index]),
                proximal_version=stats.versions.get(index),
            )
            for index, trajectory in enumerate(batch.trajectories)
        ]

    def _improved(self, measured: Mapping[str, float]) -> bool:
        """Whether this step's weights are the best so far by `eval.best`; the before-training value never counts."""
        metric = self.config.eval.best
        if metric is None or metric not in measured:
            return False
        best = best_checkpoint(self.run.checkpoint_root)
        better = best is None or measured[metric] > best.value
        # The leader's answer: on a shared file system the others may still see the older mark.
        return here().broadcast(b"1" if better else b"0") == b"1"

    def _checkpoint(self, measured: Mapping[str, float]) -> None:
        root, keep = self.run.checkpoint_root, self.config.checkpoint.keep
        store.save(root, self.step, *snapshot.take(self, measured))
        self.mark_best(measured)
        store.prune(root, keep)

    def _save(self) -> None:
        """A checkpoint of the last finished step, unless there is one already: it is not replaced by weights of a step
        that did not end."""
        written = checkpoint_folder(self.run.checkpoint_root, self.step).is_dir()
        if here().broadcast(b"1" if written else b"0") == b"0":
            self._checkpoint({})

    def mark_best(self, measured: Mapping[str, float]) -> None:
        """Remember this step's checkpoint if it is the best so far by `eval.best`; repeating it changes nothing."""
        metric = self.config.eval.best
        if metric is not None and metric in measured:
            store.mark_best(self.run.checkpoint_root, self.step, metric, measured[metric])


def _non_finite(minibatches: Sequence[MiniBatch]) -> set[int]:
    """Rows whose proximal log-probs are not finite somewhere they would be trained on: bad data, to be dropped."""
    bad: set[int] = set()
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        if micro.proximal is not None:
            finite = finite_rows(micro.mask, micro.proximal)
            bad |= {row for row, good in zip(micro.rows, finite[:, 0].tolist(), strict=True) if not good}
    return bad
