"""What the objective, the number of ranks, the task and the rewards require of a recipe, checked before training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimtab.errors import TrimtabWarning, did_you_mean
from trimtab.objectives import Objective
from trimtab.trainer.config import BATCH_BASELINE, DISTILLATION, GOLD, TOKEN_BASELINE, Config
from trimtab.trainer.config.consistency import contradictions, is_set, refuse, unused_keys
from trimtab.trainer.ranks import current_ranks
from trimtab.types import Task


def check_recipe(config: Config, objective: Objective, world_size: int | None) -> None:
    """Raises `TrimtabError` for settings that contradict each other or the objective, and warns of keys without effect.

    `world_size` is the number of ranks of this run's process group, None if it is not known.
    """
    refuse(contradictions(config))  # again: the caller may have built or changed the recipe in Python
    refuse(_objective_contradictions(config, objective))
    if current_ranks().is_leader:
        for line in (*unused_keys(config), *_unread_keys(config, objective, world_size)):
            warnings.warn(line, TrimtabWarning, stacklevel=2)


def _objective_contradictions(config: Config, objective: Objective) -> Iterator[str]:
    name, trainer, demonstrations = objective.name, config.trainer, config.demonstrations
    if demonstrations is not None and demonstrations.path != GOLD and not Path(demonstrations.path).is_file():
        yield f"demonstrations.path = {demonstrations.path!r}: there is no such file"
    if demonstrations is not None and "off_policy" not in objective.needs:
        yield f"[demonstrations] needs an objective for tokens without a behavior policy (luffy), not {name!r}"
    section = "perturbation" if config.perturbation is not None else "prefix" if config.prefix is not None else None
    if section is not None and objective.ratio.over != "behavior":
        yield f"[{section}] needs an objective over the behavior policy (current/behavior), not {name!r}"
    over_proximal = next((mask.rule for mask in objective.masks if "proximal" in mask.reads), None)
    if section is not None and over_proximal is not None:
        yield (
            f"[{section}] needs masks over the current policy, not {over_proximal} over the proximal one: set over = "
            '"current" in it'
        )
    if objective.single_behavior and (config.prefix is not None or trainer.unfinished == "continue"):
        yield (f"objective {name!r} needs one behavior policy per response: leave [prefix] and trainer.in_flight out")
    sampled_by = "proximal" if trainer.proximal == "snapshot" else "behavior"
    if trainer.max_lag and not {"behavior", sampled_by} & objective.policy_needs:
        yield (
            f"trainer.max_lag = {trainer.max_lag} gives objective {name!r} tokens of older policies, but it never "
            "reads their log-probs and would anchor to the trainer's own: choose one that corrects (token-tis, icepop, "
            'token-bypass, m2po, ...), or set trainer.proximal = "snapshot" or max_lag = 0'
        )
    if config.routing.replay == "proximal" and ("proximal" not in objective.needs or trainer.updates_per_step == 1):
        # With a single update, the training forward is the proximal pass: it would replay its own choice.
        yield (
            'routing.replay = "proximal" records experts in the proximal pass, and there is none with objective '
            f"{name!r} and {trainer.updates_per_step} updates of a batch: raise trainer.minibatches or trainer.epochs "
            'with an objective that reads the proximal policy, or use "rollout"'
        )
    if "head_behavior" in objective.needs and (config.sampling.top_logprobs == 0 or config.engine.type == "server"):
        yield (
            f"objective {name!r} reads the sampler's most probable ids, which servers do not return here: set "
            "sampling.top_logprobs (128 hold more than 99.9% of the mass) or leave it out, and use engine.type "
            '"embedded" or "vllm"'
        )
    yield from _advantage_contradictions(config, objective)


def _advantage_contradictions(config: Config, objective: Objective) -> Iterator[str]:
    expected = objective.advantage
    kind = config.advantage.kind or expected
    if kind != expected and (expected != "grpo" or kind == "optimal"):
        yield f"advantage.kind = {kind!r} does not fit objective {objective.name!r}, which expects {expected!r}"
    if kind in (TOKEN_BASELINE, DISTILLATION) and objective.one_advantage_per_response:
        yield (
            f'advantage.kind = "{kind}" gives each token its own advantage, and objective {objective.name!r} '
            "judges whole responses: use a token-level objective"
        )
    if kind == DISTILLATION and config.model.reference is None:
        yield 'advantage.kind = "distillation" needs a teacher: set model.reference to its folder or HF id'
    if kind in (BATCH_BASELINE, DISTILLATION) and config.trainer.dynamic_sampling:
        yield (
            f"trainer.dynamic_sampling replaces groups whose first rewards are equal, from which advantage {kind!r} "
            "learns: leave it out, or choose another advantage"
        )
    if kind not in (BATCH_BASELINE, DISTILLATION) and config.trainer.samples == 1:
        yield (
            f"trainer.samples = 1 gives no training signal: advantage {kind!r} compares the responses to one prompt "
            "with each other; set it to 2 or more"
        )


def _unread_keys(config: Config, objective: Objective, world_size: int | None) -> Iterator[str]:
    """Yields a line for each key that is set and has no effect with this objective and number of ranks."""
    trainer, name = config.trainer, objective.name
    if config.advantage.value_beta is not None and objective.advantage != "optimal":
        yield f"advantage.value_beta has no effect on objective {name!r}: leave it out"
    if config.model.reference and "reference" not in objective.needs and config.advantage.kind != DISTILLATION:
        yield f"model.reference has no effect on objective {name!r} without objective.kl_coef: leave it out"
    if config.sampling.top_logprobs and "head_behavior" not in objective.needs:
        yield f"sampling.top_logprobs has no effect on objective {name!r}, which centers no scores: leave it out"
    if trainer.proximal != "current" and "proximal" not in objective.needs:
        yield f"trainer.proximal has no effect on objective {name!r}, which reads no proximal policy: leave it out"
    if is_set(config, "sharding") and (config.ray.trainers if config.placement == "ray" else world_size) == 1:
        yield "[sharding] has no effect with one process: start several with torchrun, or leave it out"
    if trainer.max_lag and objective.single_behavior and (trainer.sync_every or 1) <= trainer.updates_per_step:
        # The buffer is emptied when the sampler gets new weights.
        yield (
            f"trainer.max_lag has no effect on objective {name!r}, which never trains on responses of older weights "
            "than the engine's: set trainer.sync_every above the updates of a step, or leave max_lag out"
        )


def task_contradictions(
    config: Config, task: Task, rewards: Sequence[str], eval_metrics: Sequence[str]
) -> Iterator[str]:
    """Yields errors: a task with too few problems, unknown or repeated metrics, rewards with a reserved name.

    `rewards` are the names under which rewards are logged, `eval_metrics` the keys of all accuracies that are measured.
    """
    if not len(task.train):
        yield f"task {task.name!r} has no problems to train on: lower its holdout or give it more rows"
    skip, problems = config.eval.skip, config.eval.problems
    if skip and skip + problems > len(task.test):
        yield (
            f"eval.skip = {skip} and eval.problems = {problems} exceed the {len(task.test)} held-out problems: lower "
            "them or hold out more"
        )
    if unknown := next((name for name in config.eval.best_metrics if name not in eval_metrics), None):
        yield f"eval.best = {unknown!r} is not measured in this run{did_you_mean(unknown, eval_metrics)}"
    if twice := next((name for name in eval_metrics if eval_metrics.count(name) > 1), None):
        yield f"[[eval.task]]: two tasks would log {twice!r}: leave one of them out"
    if taken := next((name for name in rewards if name in ("mean", "std", "failed")), None):
        yield f"a reward cannot be named {taken!r}, a metric has that name: rename the function"
