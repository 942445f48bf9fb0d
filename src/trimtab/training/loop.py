"""The training loop. All state of a run belongs to `Trainer`.

One iteration of `Trainer.train`:

    1. take       the rollout source returns complete groups of scored trajectories
    2. prepare    pack them into micro-batches, score the proximal and the reference policy, drop rows whose proximal
                  log-probs are not finite, compute advantages over whole groups
    3. calibrate  in the first step, and only if the recipe asks for it: take the objective's bounds from the batch
    4. update     one optimizer update for each mini-batch, `trainer.epochs` times
    5. publish    give the engines the new weights, if `trainer.sync_every` updates have passed since the last time
    6. evaluate   greedy accuracy on held-out problems, every `eval.every` steps
    7. write      trajectories, metrics and a checkpoint; then sinks and the observer

The rollout source (rollout/source.py) generates a batch when it is asked for one, or takes it from engines that
generate while the trainer updates. Policies are dated in optimizer updates: version n is the policy after n updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from trimtab.config import Config
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
from trimtab.training import step_metrics
from trimtab.training.batching import micro_batches, rows_with_non_finite_proximal, split_minibatches, to_tensors
from trimtab.training.checkpoint import snapshot, store
from trimtab.training.features.bitwise_check import NOT_CONFIRMED_MESSAGE, check_bitwise_equal
from trimtab.training.features.calibration import LAG_MESSAGE, calibrate
from trimtab.training.features.length_surge import LengthSurge
from trimtab.training.held_out import HeldOut
from trimtab.training.idle import IdleSteps, explain_missing_signal
from trimtab.training.learner import Learner, MiniBatch, NonFiniteUpdateError
from trimtab.training.observer import Moment, Observer
from trimtab.training.optim import surge_share
from trimtab.training.ranks import current_ranks
from trimtab.training.sinks import Sink
from trimtab.training.step_statistics import StepStatistics
from trimtab.training.stop import Stop
from trimtab.types import Engine, Trajectory


@dataclass
class Batch:
    """The data of one step; `dropped` counts trajectories left out for proximal log-probs that are not finite."""

    trajectories: list[Trajectory]
    minibatches: list[MiniBatch]
    advantages: torch.Tensor  # (rows, 1)
    dropped: int


@dataclass
class Trainer:
    """The state of one run and its training loop.

    `step` counts finished steps, `learner.updates` optimizer updates. `seconds` holds the duration of each phase of the
    current step; `initial_metrics` were measured before the first step and are logged with it.
    """

    config: Config
    source: RolloutSource
    learner: Learner
    run: RunDirectory
    observer: Observer
    surge: LengthSurge | None = None
    canary: Canary | None = None
    sinks: Sequence[Sink] = ()
    stop: Stop = field(default_factory=Stop)
    idle: IdleSteps = field(default_factory=IdleSteps)
    initial_metrics: dict[str, float] = field(default_factory=dict)
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def collector(self) -> Collector:
        return self.source.collector

    @cached_property
    def held_out(self) -> HeldOut:
        return HeldOut.of(self.collector)

    def train(self) -> dict[str, Any]:
        """Train to the last step and return its metrics.

        Raises `DivergedError` after updates that were not finite (the message names the last good checkpoint),
        `TrimtabError` after `trainer.max_idle_steps` steps without a training signal, `Stopped` on request.
        """
        logged = self.run.metrics()  # a resumed run may already be complete
        metrics: dict[str, Any] = logged[-1] if logged else {}
        before: dict[str, float] = {}
        if self.step == 0:
            self._publish(force=True)
            before = self._evaluate("before")
        with self.stop.finishing():
            while self.step < self.config.trainer.steps:
                self._stop_if_requested()
                metrics = self._train_step(before)
                before = {}
        return metrics

    def _train_step(self, before: dict[str, float]) -> dict[str, Any]:
        """Run one iteration and return its metrics. `before`: accuracy before training, logged with the first step."""
        start = time.perf_counter()
        version = self.learner.updates
        self.observer.phase("collect", self.step, self.config.trainer.steps)
        groups, rollout_stats = self.source.take(version, self.config.trainer.steps - self.step)
        batch = self._prepare_batch(groups)
        calibration = self._calibrate(batch)
        stats = self._update(batch)
        confirmed = self._confirm_bitwise_equality(batch, stats)
        self._publish()
        self.step += 1
        self.seconds["step"] = time.perf_counter() - start

        metrics = self._metrics(batch, rollout_stats, stats, version)
        metrics |= self.initial_metrics if self.step == 1 else {}
        idle_message = self._observe_idle(batch)
        metrics |= calibration | self._observe_length(metrics.get("length/mean")) | confirmed
        metrics |= before | {
            f"{key.removesuffix('/greedy')}/before": value for key, value in before.items() if key.endswith("/greedy")
        }
        evaluated: dict[str, float] = {}
        if self._is_due(self.config.eval.every):
            evaluated = self._evaluate("after" if self.step == self.config.trainer.steps else self.step)
        metrics |= evaluated
        self._write(batch, stats, metrics, evaluated)
        for message in (*dict.fromkeys(rollout_stats.errors), *idle_message):
            self.observer.message(message)
        self._stop_if_idle(batch)
        return metrics

    def _stop_if_requested(self) -> None:
        """Save a checkpoint and raise `Stopped` if any rank was asked to end the run. Called between two steps."""
        signal_number = int(current_ranks().all_reduce_max(self.stop.asked or 0))
        if not signal_number:
            return
        if self.step:
            self._save()
            self.observer.message(f"stopped after step {self.step}, which is saved")
        raise Stopped(signal_number)

    def _stop_if_idle(self, batch: Batch) -> None:
        """Save a checkpoint and raise `TrimtabError` after `trainer.max_idle_steps` steps without training signal."""
        limit = self.config.trainer.max_idle_steps
        if limit and self.idle.steps >= limit and self.step < self.config.trainer.steps:
            self._save()
            why = explain_missing_signal(batch.trajectories, self.collector.sampling.max_tokens)
            raise TrimtabError(
                f"{self.idle.steps} steps in a row taught nothing, in the last one {why}; step {self.step} is saved: "
                "look at the reward and the responses, or raise trainer.max_idle_steps (0: never stop)"
            )

    def _observe_idle(self, batch: Batch) -> list[str]:
        """Update the count of idle steps; returns the message for this step, if there is one."""
        if self.learner.objective.learns_without_advantage:
            return []
        message = self.idle.observe(batch.trajectories, batch.advantages, self.collector.sampling.max_tokens)
        return [] if message is None else [f"step {self.step}: {message}"]

    def _prepare_batch(self, groups: Sequence[Group]) -> Batch:
        """Pack the groups, score the fixed policies, drop bad rows and compute advantages over what is left."""
        rows = [trajectory for group in groups for trajectory in group]
        dropped = 0
        while True:  # dropping a row changes the packing: the others are packed and scored again
            start = time.perf_counter()
            minibatches = self.learner.score_fixed_policies(self._pack(rows))
            self.seconds["proximal"] = time.perf_counter() - start
            bad = rows_with_non_finite_proximal(minibatches)
            if not bad:
                break
            dropped += len(bad)
            rows = [trajectory for index, trajectory in enumerate(rows) if index not in bad]
        values = self._advantages(rows)
        for minibatch in minibatches:
            for index, micro in enumerate(minibatch):
                minibatch[index] = micro.with_scores(advantage=values[list(micro.rows)].to(self.learner.device))
        return Batch(rows, minibatches, values, dropped)

    def _advantages(self, rows: Sequence[Trajectory]) -> torch.Tensor:
        """Advantages (rows, 1) in float32, from the rewards of each group."""
        kind = self.config.advantage.kind or self.learner.objective.advantage
        rewards = torch.tensor([trajectory.reward for trajectory in rows], dtype=torch.float64)
        if not rows:
            return rewards.view(0, 1).float()
        groups = torch.tensor([trajectory.group for trajectory in rows], dtype=torch.long)
        beta = {"value_beta": self.config.advantage.value_beta} if kind == "optimal" else {}
        return advantages(kind, rewards, groups, **beta).float()

    def _pack(self, rows: Sequence[Trajectory]) -> list[MiniBatch]:
        groups: dict[int, list[int]] = {}
        for index, trajectory in enumerate(rows):
            groups.setdefault(trajectory.group, []).append(index)
        trainer, pad_id = self.config.trainer, self.collector.stream.pad_id
        replayed = self.learner.experts if self.config.routing.replay == "rollout" else None
        return [
            [
                to_tensors(rows, chosen, pad_id, self.learner.device, replayed)
                for chosen in micro_batches(rows, part, trainer.micro_batch_tokens)
            ]
            for part in split_minibatches(list(groups.values()), trainer.minibatches)
        ]

    def _calibrate(self, batch: Batch) -> dict[str, float]:
        """Take the objective's bounds from the first batch if the recipe asks for it; returns metrics."""
        if not self.config.objective.calibrate or self.learner.bounds is not None:
            return {}
        calibration = calibrate(self.learner, batch.minibatches)
        trainer = self.config.trainer
        lag = max(trainer.max_lag or 0, (trainer.sync_every or 1) - trainer.minibatches * trainer.epochs)
        cautions = [LAG_MESSAGE.format(lag)] if lag > 0 else []
        for line in (calibration.line, *cautions, *self.learner.objective.equation().splitlines()):
            self.observer.message(line)
        return calibration.metrics()

    def _update(self, batch: Batch) -> StepStatistics:
        start = time.perf_counter()
        if self.surge is not None:
            self.learner.lr_factor = surge_share(self.surge.config, self.step + 1, self.surge.step)
        number, every = self.step + 1, self.config.diagnose.every
        probe = number in (1, self.config.trainer.steps) or number % every == 0
        try:
            return self.learner.update(
                batch.minibatches, lambda done, total: self.observer.phase("update", done, total), probe=probe
            )
        except NonFiniteUpdateError as error:
            if error.weights_are_good:
                self._save()
            saved = self.run.checkpoints()
            where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"
            raise DivergedError(f"{error}; {where}: {error.advice}") from None
        finally:
            self.seconds["update"] = time.perf_counter() - start

    def _confirm_bitwise_equality(self, batch: Batch, stats: StepStatistics) -> dict[str, float]:
        """With `numerics = "invariant"`: compare log-probs of sampler and trainer bit for bit; returns metrics."""
        if self.config.numerics != "invariant":
            return {}
        confirmed = check_bitwise_equal(batch.trajectories, stats)
        if confirmed == 0 and self.step == 0:
            self.observer.message(NOT_CONFIRMED_MESSAGE)
        return {"mismatch/confirmed": confirmed}

    def _publish(self, *, force: bool = False) -> None:
        """Publish the weights if `trainer.sync_every` updates have passed since the last publication."""
        start = time.perf_counter()
        every, version = self.config.trainer.sync_every or 1, self.learner.updates
        if force or version - self.source.published >= every:
            self.publish_now()
        self.seconds["publish"] = time.perf_counter() - start

    def publish_now(self) -> None:
        """Give the engines the current weights, and the canary the log-probs it must find there."""
        version = self.learner.updates
        expected = None if self.canary is None else self.canary.expect(self.learner.model, version)
        self.source.publish(named_weights(self.learner.model), version, expected)

    def _evaluate(self, moment: Moment) -> dict[str, float]:
        """Greedy accuracy on held-out problems, with weights in the engine's dtype, neither quantized nor perturbed.

        The sampler's own weights are restored afterwards.
        """
        task = self.collector.stream.task

        def measure(engine: Engine) -> tuple[float, int]:
            return self.held_out.measure(engine, self.collector)

        weights, version = named_weights(self.learner.model), self.learner.updates
        quantized = weight_quantization(self.config).active
        accuracy, problems = self.source.evaluate_with(weights, version, measure, quantized=quantized)
        self.observer.evaluated(task.name, moment, accuracy)
        return {f"eval/{task.name}/greedy": accuracy, f"eval/{task.name}/problems": problems}

    def _is_due(self, every: int) -> bool:
        return self.step == self.config.trainer.steps or bool(every and self.step % every == 0)

    def _metrics(self, batch: Batch, rollout: RolloutStats, stats: StepStatistics, version: int) -> dict[str, Any]:
        """The metrics of a step that docs/metrics.md lists."""
        self.seconds |= {"collect": rollout.seconds_generating, "score": rollout.seconds_scoring}
        return {
            "step": self.step,
            "updates": self.learner.updates,
            "policy_version": self.source.published,
            **step_metrics.batch_metrics(batch.trajectories, version),
            **step_metrics.rollout_metrics(rollout, dropped=batch.dropped),
            **step_metrics.update_metrics(
                stats,
                mismatch_policy=self.learner.mismatch_policy,
                grad_clip=self.config.optim.grad_clip,
                ranks=self.learner.ranks.size,
            ),
            **self._feature_metrics(batch, rollout, stats, version),
            **step_metrics.speed_metrics(self.seconds, rollout.response_tokens, stats.tokens),
        }

    def _feature_metrics(
        self, batch: Batch, rollout: RolloutStats, stats: StepStatistics, version: int
    ) -> dict[str, float]:
        """Metrics of optional features; empty for those that the run does not use."""
        metrics: dict[str, float] = {}
        if replaced := self.collector.stream.newly_replaced():
            metrics["prompt/dropped"] = replaced
        if self.collector.prefixes is not None:
            metrics |= step_metrics.prefix_metrics(batch.trajectories, version)
        if self.collector.experts is not None:
            metrics |= step_metrics.expert_metrics(rollout)
        if self.learner.perturbation is not None:
            metrics |= step_metrics.perturbation_metrics(self.learner.perturbation, stats)
        if self.learner.experts is not None:
            metrics |= step_metrics.routing_metrics(batch.trajectories, stats)
        if self.config.is_async:
            metrics |= step_metrics.async_metrics(batch.trajectories, rollout, version)
        if self.canary is not None:
            metrics |= self.canary.metrics()
        if self.learner.bounds is not None:
            metrics |= {f"calibrate/{name}": bound for name, bound in self.learner.bounds.items()}
        return metrics

    def _observe_length(self, length: float | None) -> dict[str, float]:
        """Update the length-surge detector; must run before this step's checkpoint, which saves its state."""
        if self.surge is None:
            return {}
        if message := self.surge.observe(self.step, length):
            self.observer.message(message)
        return {} if self.surge.step is None else {"optim/surge_step": self.surge.step}

    def _write(
        self, batch: Batch, stats: StepStatistics, metrics: dict[str, Any], evaluated: Mapping[str, float]
    ) -> None:
        """Write this step's files, then call sinks and observer: what a display shows is already on disk."""
        every = self.config.log.trajectories_every
        if self.run.writes and every and self.step % every == 0:
            rows = self._trajectory_rows(batch, stats)
            trajectories.write(self.run.trajectory_file(self.step), rows, self.step)
        self.run.log(metrics)
        if self._is_due(self.config.checkpoint.every) or self._has_improved(evaluated):
            self._checkpoint(evaluated)
        for sink in self.sinks:
            sink.log(self.step, metrics)
        self.observer.step(metrics)

    def _trajectory_rows(self, batch: Batch, stats: StepStatistics) -> list[trajectories.Row]:
        """Trajectories with advantages and the trainer's log-probs that the mismatch metrics used."""
        proximal = self.learner.mismatch_policy == "proximal"
        return [
            trajectories.Row(
                trajectory,
                logp_proximal=stats.mismatch_logps.get(index) if proximal else None,
                logp_current=None if proximal else stats.mismatch_logps.get(index),
                logp_perturbed=stats.perturbed.get(index),
                advantage=float(batch.advantages[index]),
                proximal_version=stats.versions.get(index),
            )
            for index, trajectory in enumerate(batch.trajectories)
        ]

    def _has_improved(self, evaluated: Mapping[str, float]) -> bool:
        """Whether this step has the best value of `eval.best` so far; the value before training does not count."""
        metric = self.config.eval.best
        if metric is None or metric not in evaluated:
            return False
        best = best_checkpoint(self.run.checkpoint_root)
        improved = best is None or evaluated[metric] > best.value
        # The leader decides: on a shared file system other ranks may still read the previous best.json.
        return current_ranks().broadcast(b"1" if improved else b"0") == b"1"

    def _checkpoint(self, evaluated: Mapping[str, float]) -> None:
        store.save(self.run.checkpoint_root, self.step, *snapshot.capture(self, evaluated))
        self.mark_best(evaluated)
        store.delete_old(self.run.checkpoint_root, self.config.checkpoint.keep)

    def _save(self) -> None:
        """Save the last finished step, unless it is saved: a step that failed must not overwrite its checkpoint."""
        exists = checkpoint_folder(self.run.checkpoint_root, self.step).is_dir()
        if current_ranks().broadcast(b"1" if exists else b"0") == b"0":
            self._checkpoint({})

    def mark_best(self, evaluated: Mapping[str, float]) -> None:
        """Mark this step's checkpoint if it is the best so far by `eval.best`. Idempotent."""
        metric = self.config.eval.best
        if metric is not None and metric in evaluated:
            store.mark_best(self.run.checkpoint_root, self.step, metric, evaluated[metric])
