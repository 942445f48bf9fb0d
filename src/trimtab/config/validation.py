"""Refuses recipes whose settings contradict each other, by one table of rules. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trimtab.config.objective_sections import BATCH_BASELINE, TOKEN_BASELINE
from trimtab.config.recipe_rules import RECIPE_RULES
from trimtab.config.rule import Facts, Rule, Stage
from trimtab.config.schema import GOLD, ShardingConfig
from trimtab.errors import TrimtabError, did_you_mean


def _not_over_behavior(facts: Facts) -> str | None:
    """Returns why the objective does not compare the current policy with the sampler alone, or None."""
    assert facts.objective is not None
    if facts.objective.ratio.over != "behavior":
        return f"an objective over the behavior policy (current/behavior), not {facts.objective.name!r}"
    for rule in facts.objective.masks:
        if "proximal" in rule.reads:
            return f'masks over the current policy, not {rule.rule} over the proximal one: set over = "current" in it'
    return None


def _is_one_process(facts: Facts) -> bool:
    config = facts.config
    return (config.ray.trainers if config.placement == "ray" else facts.world_size) == 1


def _is_missing_file(facts: Facts) -> bool:
    section = facts.config.demonstrations
    return section is not None and section.path != GOLD and not Path(section.path).is_file()


def _other_advantage(facts: Facts) -> bool:
    """Whether the recipe names an advantage that the objective does not support."""
    assert facts.objective is not None
    kind, expected = facts.config.advantage.kind, facts.objective.advantage
    return kind not in (None, expected) and (expected != "grpo" or kind == "optimal")


def _group_advantage_of_one(facts: Facts) -> str | None:
    """Returns the kind of advantage if it compares the responses to one prompt, of which there is one."""
    assert facts.objective is not None
    kind = facts.config.advantage.kind or facts.objective.advantage
    return kind if facts.config.trainer.samples == 1 and kind != BATCH_BASELINE else None


def _compares_the_batch(facts: Facts) -> bool:
    assert facts.objective is not None
    return (facts.config.advantage.kind or facts.objective.advantage) == BATCH_BASELINE


def _unmeasured_metric(facts: Facts) -> str | None:
    """Returns what is wrong with a metric of `eval.best` that is not measured, and those that are."""
    unknown = [name for name in facts.config.eval.best_metrics if name not in facts.eval_metrics]
    return (
        f"{unknown[0]!r} is not measured in this run{did_you_mean(unknown[0], facts.eval_metrics)}" if unknown else None
    )


_OBJECTIVE_RULES = (
    Rule(
        "sharding-one-process",
        lambda f: _is_one_process(f) and f.config.sharding != ShardingConfig(),
        "[sharding] has no effect with one process: start several with torchrun (or set ray.trainers), or leave it out",
    ),
    Rule(
        "demonstrations-file",
        _is_missing_file,
        "demonstrations.path = {demonstrations.path!r}: there is no such file",
    ),
    Rule(
        "perturbation-needs-behavior",
        lambda f: f.config.perturbation and _not_over_behavior(f),
        "[perturbation] needs {value}",
    ),
    Rule(
        "prefix-needs-behavior",
        lambda f: f.config.prefix and _not_over_behavior(f),
        "[prefix] needs {value}",
    ),
    Rule(
        "demonstrations-need-off-policy",
        lambda f: f.config.demonstrations and "off_policy" not in f.objective.needs,
        "[demonstrations] needs an objective for tokens without a behavior policy (luffy), not {objective.name!r}",
    ),
    Rule(
        "prefix-single-behavior",
        lambda f: f.config.prefix and f.objective.single_behavior,
        "objective {objective.name!r} needs one behavior policy per sample: leave [prefix] out",
    ),
    Rule(
        "value-beta-unused",
        lambda f: f.config.advantage.value_beta is not None and f.objective.advantage != "optimal",
        "advantage.value_beta has no effect on objective {objective.name!r}: leave it out",
    ),
    Rule(
        "lag-needs-correction",
        lambda f: f.config.trainer.max_lag and "behavior" not in f.objective.policy_needs,
        "trainer.max_lag = {trainer.max_lag} gives objective {objective.name!r} tokens of older policies, but it "
        "never reads their log-probs and would anchor to the trainer's own: choose one that corrects (token-tis, "
        "icepop, token-bypass, m2po, ...), or set max_lag = 0",
    ),
    Rule(
        "continue-single-behavior",
        lambda f: f.config.trainer.in_flight == "continue" and f.objective.single_behavior,
        'objective {objective.name!r} needs one behavior policy per response, trainer.in_flight = "continue" makes '
        'several: use "finish" or "discard"',
    ),
    Rule(
        "refresh-every-step",
        # The buffer is emptied when the sampler is refreshed.
        lambda f: (
            f.config.trainer.max_lag
            and f.objective.single_behavior
            and (f.config.trainer.sync_every or 1) <= f.config.trainer.updates_per_step
        ),
        "objective {objective.name!r} never trains on responses of older weights than the engine's, which are new in "
        "every step here, so nothing could be generated ahead: set trainer.sync_every above the "
        "{trainer.updates_per_step} updates of a step, or leave trainer.max_lag out",
    ),
    Rule(
        "replay-proximal-needs-pass",
        lambda f: f.config.routing.replay == "proximal" and "proximal" not in f.objective.needs,
        'routing.replay = "proximal" records experts in the proximal pass, and objective {objective.name!r} has none: '
        'use "rollout"',
    ),
    Rule(
        "top-logprobs-unread",
        lambda f: f.config.sampling.top_logprobs and "head_behavior" not in f.objective.needs,
        "sampling.top_logprobs has no effect on objective {objective.name!r}, which centers no scores: leave it out",
    ),
    Rule(
        "top-logprobs-needed",
        lambda f: f.config.sampling.top_logprobs == 0 and "head_behavior" in f.objective.needs,
        "objective {objective.name!r} reads the sampler's most probable ids: set sampling.top_logprobs (128 hold more "
        "than 99.9 % of the mass), or leave it out",
    ),
    Rule(
        "top-logprobs-server",
        lambda f: f.config.engine.type == "server" and "head_behavior" in f.objective.needs,
        "objective {objective.name!r} reads the sampler's most probable ids, which servers do not return here: use "
        'engine.type "embedded" or "vllm"',
    ),
    Rule(
        "advantage-mismatch",
        _other_advantage,
        "advantage.kind = {advantage.kind!r} does not fit objective {objective.name!r}, which expects "
        "{objective.advantage!r}",
    ),
    Rule(
        "token-advantage-of-responses",
        lambda f: f.config.advantage.kind == TOKEN_BASELINE and f.objective.one_advantage_per_response,
        'advantage.kind = "optimal-token" gives each token its own advantage, and objective {objective.name!r} judges '
        "whole responses: use a token-level objective",
    ),
    Rule(
        "dynamic-sampling-of-batch-mean",
        lambda f: f.config.trainer.dynamic_sampling and _compares_the_batch(f),
        "trainer.dynamic_sampling replaces groups of equal rewards, which advantage 'batch-mean' compares with the "
        "rest of the batch and learns from: leave it out, or choose another advantage",
    ),
    Rule(
        "single-sample",
        _group_advantage_of_one,
        "trainer.samples = 1 teaches nothing: advantage {value!r} compares the responses to one prompt with each "
        "other; set it to 2 or more",
    ),
)

_TASK_RULES = (
    Rule(
        "task-empty",
        lambda f: not len(f.task.train),
        "task {task.name!r} has no problems to train on: lower its holdout or give it more rows",
    ),
    Rule(
        "best-metric-unknown",
        _unmeasured_metric,
        "eval.best = {value}",
    ),
    Rule(
        "eval-task-twice",
        lambda f: next((name for name in f.eval_metrics if f.eval_metrics.count(name) > 1), None),
        "[[eval.task]]: two tasks would log {value!r}: leave one of them out",
    ),
    Rule(
        "reward-name-taken",
        lambda f: next((name for name in f.rewards if name in ("mean", "std", "failed")), None),
        "a reward cannot be named {value!r}, a metric has that name: rename the function",
    ),
)

RULES: dict[Stage, tuple[Rule, ...]] = {"config": RECIPE_RULES, "objective": _OBJECTIVE_RULES, "task": _TASK_RULES}
"""All refused combinations, by the stage at which they can be decided."""


def validate(facts: Facts, *stages: Stage) -> None:
    """Checks the rules of `stages` in the order of their tables.

    Raises:
        TrimtabError: the message of the first broken rule.
    """
    for stage in stages:
        for rule in RULES[stage]:
            if (message := rule.check(facts)) is not None:
                raise TrimtabError(message)
