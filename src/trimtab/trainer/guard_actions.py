"""What a run does at a sign of a collapse: it publishes lost weights again, or returns to an earlier checkpoint.

A return restores weights, optimizer, schedule, random generators and features of that checkpoint. It drops responses
that wait or are being generated, halves the lag of the sampler and publishes the restored weights. It multiplies the
learning rate by `guard.lr_factor`; from then on the rate falls linearly to 0 at the end of the run. Step numbers go on:
discarded steps stay in metrics.jsonl, the next step logs which one it continues from, and the run gets as many more.
"""

from __future__ import annotations

from trimtab.errors import DivergedError
from trimtab.monitor.alarms import WINDOW
from trimtab.monitor.collapse_signs import Sign
from trimtab.runs.layout import checkpoint_folder
from trimtab.runs.reader import CONTINUES_FROM
from trimtab.trainer.checkpoint import run_state
from trimtab.trainer.guard import LOST


def begin(trainer: run_state.TrainerState) -> None:
    """Saves the policy of a new run, or reads the logged steps of a resumed run.

    Goes back if the run was killed after a failed step. Raises `DivergedError` if the guard has ended the run.
    """
    guard = trainer.guard
    if not guard.is_on:
        return
    guard.read(trainer.run.metrics())
    if trainer.step == 0:
        run_state.save(trainer, {})
    most = -(-WINDOW // guard.config.every) + 2
    trainer.observer.message(f"guard      watches {', '.join(guard.config.on)}; keeps up to {most} more checkpoints")
    return_if_failed(trainer)
    raise_if_exhausted(trainer)


def return_if_failed(trainer: run_state.TrainerState) -> bool:
    """Returns whether a step failed; if so, goes back to an earlier policy. Raises `DivergedError` if exhausted."""
    if not trainer.guard.state.failed:
        return False
    act(trainer, Sign(*trainer.guard.state.failed))
    raise_if_exhausted(trainer)
    return True


def act(trainer: run_state.TrainerState, sign: Sign) -> bool:
    """Publishes lost weights again, or goes back to an earlier policy. Returns True if it saved that policy."""
    if sign.name == LOST:
        _publish_again(trainer, sign)
        return False
    guard, state = trainer.guard, trainer.guard.state
    steps = guard.checkpoint_steps(trainer.run)
    healthy = [step for step in steps if step <= sign.healthy] or steps[:1]
    state.returns += 1
    state.failed = []
    checkpoint = run_state.go_back(trainer, healthy, state.returns)
    start, restored = checkpoint.step, checkpoint.meta["guard"]
    state.discarded = trainer.step - (start - restored.get("discarded", 0))
    # A checkpoint that a return saved holds the policy of an earlier step.
    policy = restored.get("marks", {}).get(CONTINUES_FROM, start)
    text = f"step {trainer.step}: {sign.name}: {sign.text}; returned to the policy of step {policy}"
    guard.log_event(text)
    state.marks[CONTINUES_FROM] = policy
    if state.returns == 1:
        state.decay_from = trainer.learner.updates
    guard.lower_rate(trainer.learner)
    if state.returns > guard.config.times:
        state.discarded += 1  # the step that logs the restored policy
        trainer.observer.message(f"{text}, for the last time")
        trainer.log_restored(guard.take_metrics())
        return True
    rate = f"the learning rate is {trainer.learner.lr_factor:g} of the recipe's and falls to 0"
    every = trainer.config.trainer.sync_every or 1
    lag = f"; weights are published every {guard.sync_every} updates" if every > 1 else ""
    trainer.observer.message(f"{text}; {rate}{lag}")
    run_state.save(trainer, {})
    return True


def _publish_again(trainer: run_state.TrainerState, sign: Sign) -> None:
    """Publishes the weights again, and drops the responses that were sampled without them."""
    trainer.learner.publish_to(trainer.source)
    _, meta, files = trainer.source.state(trainer.learner.updates)
    trainer.source.restore({}, {**meta, "ready": []}, files)
    text = f"step {trainer.step}: {sign.name}: {sign.text}; published the weights again"
    trainer.guard.log_event(text)
    trainer.observer.message(text)
    trainer.guard.leave_out_newest()


def raise_if_exhausted(trainer: run_state.TrainerState) -> None:
    """Raises `DivergedError` after more than `guard.times` returns; the last restored policy is saved."""
    guard = trainer.guard
    if guard.state.returns > guard.config.times:
        last = checkpoint_folder(trainer.run.checkpoint_root, trainer.step)
        raise DivergedError(
            f"the guard has returned {guard.config.times} times, and the run failed again: {last} has the last "
            "policy from before; choose a stricter correction or a lower optim.lr"
        )
