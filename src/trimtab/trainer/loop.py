"""The training loop. All state of a run belongs to `Trainer`.

One iteration of `Trainer.train`:

    1. take       the rollout source returns complete groups of scored trajectories
    2. prepare    pack them into micro-batches, score the proximal and the reference policy, drop rows whose proximal
                  log-probs are not finite, compute advantages over whole groups
    3. update     one optimizer update for each mini-batch, `trainer.epochs` times
    4. publish    give the engines the new weights if `trainer.sync_every` updates have passed since the last time
    5. measure    collect the metrics of the step
    6. evaluate   accuracy on held-out problems, greedy and of several samples, every `eval.every` steps
    7. write      trajectories, metrics and a checkpoint; then sinks and the observer
    8. guard      with `[guard]`: return to an earlier checkpoint if there is a sign of a collapse

The rollout source (trainer/rollout/source.py) generates a batch when it is asked for one, or takes it from engines that
generate while the trainer updates. Optional methods take part through `Learner.features` (features/feature.py).
Policy versions count optimizer updates: version n is the policy after n updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trimtab.errors import DivergedError, Stopped
from trimtab.runs import trajectories
from trimtab.trainer import guard_actions, step_statistics
from trimtab.trainer.batch_preparation import Batch, prepare_batch
from trimtab.trainer.checkpoint import run_state
from trimtab.trainer.features.feature import StepRecord
from trimtab.trainer.held_out import HeldOut
from trimtab.trainer.models.sharding import named_weights
from trimtab.trainer.observer import Moment, Sink
from trimtab.trainer.optim import NonFiniteUpdateError
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.rollout.collector import Group
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.trainer.stop import Stop
from trimtab.types import Engine


@dataclass(kw_only=True)
class Trainer(run_state.TrainerState):
    """The state of one run and its training loop."""

    held_out: Sequence[HeldOut] = ()  # the problems of the run's own task come first
    sinks: Sequence[Sink] = ()
    stop: Stop = field(default_factory=Stop)
    initial_metrics: dict[str, float] = field(default_factory=dict)  # measured before the first step, logged with it
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase of the current step

    @property
    def steps(self) -> int:
        """Number of the last step: `trainer.steps` plus the steps that the guard discarded."""
        return self.config.trainer.steps + self.guard.state.discarded

    def train(self) -> dict[str, Any]:
        """Trains to the last step and returns its metrics.

        Raises `DivergedError` after updates that were not finite (the message names the last good checkpoint),
        `TrimtabError` after `trainer.max_idle_steps` steps without a training signal, `Stopped` on request.
        """
        for line in (line for held_out in self.held_out for line in held_out.lines()):
            self.observer.message(line)
        logged = self.run.metrics()  # a resumed run may already be complete
        metrics: dict[str, Any] = logged[-1] if logged else {}
        if self.step == 0:
            self._publish(force=True)
            for key, value in self._evaluate("before").items():
                self.initial_metrics[key] = value
                if key.endswith("/greedy"):
                    self.initial_metrics[f"{key.removesuffix('/greedy')}/before"] = value
        guard_actions.begin(self)
        with self.stop.finishing():
            while self.step < self.steps:
                self._stop_if_requested()
                metrics = self._train_step()
        return metrics

    def _train_step(self) -> dict[str, Any]:
        # 1. take
        start, version, steps = time.perf_counter(), self.learner.updates, self.steps
        self.observer.phase("collect", self.step, steps)
        groups, rollout = self.source.take(version, steps - self.step)
        # 2. prepare, 3. update
        try:
            batch, stats = self._prepare_and_update(groups)
        except DivergedError:
            if guard_actions.return_if_failed(self):
                return {}
            raise
        # 4. publish
        self._publish()
        self.step += 1
        # 5. measure
        self.seconds["step"] = time.perf_counter() - start
        metrics = self._metrics(batch, rollout, stats, version)
        metrics |= self.initial_metrics if self.step == 1 else {}
        idle_message = self._observe_idle(batch)
        # 6. evaluate
        evaluate = self._is_due(self.config.eval.every)
        evaluated = self._evaluate("after" if self.step == steps else self.step) if evaluate else {}
        metrics |= evaluated
        # 7. write, 8. guard
        self._write(batch, stats, metrics, evaluated)
        for message in (*rollout.messages(), *idle_message):
            self.observer.message(message)
        guard_actions.raise_if_exhausted(self)
        if self._is_idle_too_long():
            run_state.save_if_unsaved(self)
            raise self.idle.error(batch.trajectories, self.source.collector.sampling.max_tokens, self.step)
        return metrics

    def _prepare_and_update(self, groups: Sequence[Group]) -> tuple[Batch, StepStatistics]:
        """Trains on the groups. If the device's memory is full, tries again with half the tokens per micro-batch."""
        version = self.learner.updates
        while True:
            try:
                batch = prepare_batch(groups, self.learner, self.source.collector.stream.pad_id)
                return batch, self._update(batch)
            except torch.OutOfMemoryError:
                tokens = self.learner.micro_batch_tokens
                # Not possible after an update of this batch, or while other ranks wait in the middle of their update.
                if self.learner.updates != version or self.learner.ranks.size > 1 or tokens is None or tokens < 2:
                    raise
            # Outside of `except`: inside, the traceback would keep the tensors of the failed update.
            self.learner.micro_batch_tokens = tokens // 2
            self.learner.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            self.observer.message(
                f"step {self.step + 1}: the device's memory was full; the update is repeated with "
                f"trainer.micro_batch_tokens = {tokens // 2}, half of before"
            )

    def _update(self, batch: Batch) -> StepStatistics:
        start = time.perf_counter()
        try:
            on_progress = partial(self.observer.phase, "update")
            return self.learner.update(batch.minibatches, on_progress, step=self.step + 1)
        except NonFiniteUpdateError as error:
            self.guard.step_failed(error, self.step)
            if error.weights_are_good:
                run_state.save_if_unsaved(self)
            saved = self.run.checkpoints()
            where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"
            raise DivergedError(f"{error}; {where}: {error.advice}") from None
        finally:
            self.seconds["update"] = time.perf_counter() - start

    def _publish(self, *, force: bool = False) -> None:
        """Publishes the weights if `trainer.sync_every` updates have passed since the last publication."""
        start = time.perf_counter()
        if force or self.learner.updates - self.source.published >= self.guard.sync_every:
            self.learner.publish_to(self.source)
        self.seconds["publish"] = time.perf_counter() - start

    def _metrics(self, batch: Batch, rollout: RolloutStats, stats: StepStatistics, version: int) -> dict[str, Any]:
        """Returns the metrics of a step (see runs/metrics.toml). `version`: number of updates before the step."""
        self.seconds["proximal"] = batch.seconds
        self.seconds |= {"collect": rollout.seconds_generating, "score": rollout.seconds_scoring}
        metrics: dict[str, Any] = {
            "step": self.step,
            "updates": self.learner.updates,
            "policy_version": self.source.published,
            **step_statistics.batch_metrics(batch.trajectories, version),
            **step_statistics.rollout_metrics(rollout, dropped=batch.dropped),
            **step_statistics.update_metrics(
                stats,
                mismatch_policy=self.learner.mismatch_policy,
                grad_clip=self.config.optim.grad_clip,
                ranks=self.learner.ranks.size,
            ),
            **step_statistics.speed_metrics(self.seconds, rollout.response_tokens, stats.tokens),
        }
        if replaced := self.source.collector.stream.newly_replaced():
            metrics["prompt/dropped"] = replaced
        metrics |= self.guard.take_metrics(rollout.republished)
        record = StepRecord(self.step, version, batch.trajectories, rollout, stats)
        for feature in self.learner.features:
            metrics |= feature.end_step(record)
        return metrics

    def _evaluate(self, moment: Moment) -> dict[str, float]:
        """Returns held-out accuracies of the weights in the engine's dtype, without quantization or perturbation."""

        def measure(engine: Engine) -> dict[str, float]:
            parts = [held_out.measure(engine, self.source.collector) for held_out in self.held_out]
            return {key: value for part in parts for key, value in part.items()}

        measured = self.source.evaluate_with(named_weights(self.learner.model), self.learner.updates, measure)
        for held_out in self.held_out:
            self.observer.evaluated(held_out.task.name, moment, measured[held_out.metrics[0]])
        return measured

    def _is_due(self, every: int) -> bool:
        return self.step == self.steps or bool(every and self.step % every == 0)

    def _write(self, batch: Batch, stats: StepStatistics, metrics: dict[str, Any], evaluated: dict[str, float]) -> None:
        """Writes this step's files, then calls sinks and observer, so that what a display shows is already on disk."""
        every = self.config.log.trajectories_every
        if self.run.writes and every and self.step % every == 0:
            rows = batch.rows(stats, self.learner.mismatch_policy)
            trajectories.write(self.run.trajectory_file(self.step), rows, self.step)
        self.run.log(metrics)
        idle = self.idle.steps if self._is_idle_too_long() else 0
        sign = self.guard.judge(metrics, idle)
        if sign is None or not guard_actions.act(self, sign):
            self._save_if_due(evaluated)
        for sink in self.sinks:
            sink.log(metrics["step"], metrics)
        self.observer.step(metrics)

    def _save_if_due(self, evaluated: dict[str, float]) -> None:
        """Saves a checkpoint if one is due. If only the guard needs it, training does not wait for the disk."""
        if self._is_due(self.config.checkpoint.every) or run_state.has_improved(self, evaluated):
            run_state.save(self, evaluated)
        elif self.guard.is_on and self.step % self.config.guard.every == 0:
            run_state.save(self, evaluated, wait=False)

    def log_restored(self, metrics: Mapping[str, Any]) -> None:
        """Evaluates the policy that the guard restored, and logs and saves it as an additional step."""
        self.step += 1
        evaluated = self._evaluate("after")
        self.run.log({"step": self.step, "updates": self.learner.updates, **metrics, **evaluated})
        run_state.save(self, {})

    def _stop_if_requested(self) -> None:
        """Saves a checkpoint and raises `Stopped` if any rank was asked to end the run. Called between two steps."""
        signal_number = int(current_ranks().all_reduce_max(self.stop.signal_number or 0))
        if not signal_number:
            return
        if self.step:
            run_state.save_if_unsaved(self)
            self.observer.message(f"stopped after step {self.step}, which is saved")
        raise Stopped(signal_number)

    def _is_idle_too_long(self) -> bool:
        limit = self.config.trainer.max_idle_steps
        return bool(limit) and self.idle.steps >= limit and self.step < self.steps

    def _observe_idle(self, batch: Batch) -> list[str]:
        """Updates the count of idle steps; returns the message for this step, if there is one."""
        if self.learner.objective.learns_without_advantage or self.learner.distills:
            return []
        message = self.idle.observe(batch.trajectories, batch.advantages, self.source.collector.sampling.max_tokens)
        return [] if message is None else [f"step {self.step}: {message}"]
