"""Every refused combination of settings: one recipe that breaks it, refused in one line before a model is loaded."""

from __future__ import annotations

import pytest

from trimtab import tasks
from trimtab.config import Config, load_config, recipes
from trimtab.config.rule import Facts
from trimtab.config.validation import RULES, validate
from trimtab.errors import TrimtabError
from trimtab.objectives.from_section import from_section
from trimtab.training.held_out import eval_metrics
from trimtab.training.run import check

SERVER = "engine.type=server engine.server.urls=['http://a:1']"
VLLM = "engine.type=vllm"
SETS = f"{VLLM} engine.vllm.sampling_mask=true"
SOUP, LUFFY, RAY = "objective.name=soup", "objective.name=luffy objective.length_max=11", "placement=ray"
INVARIANT, REPLAY = "numerics=invariant", "routing.replay=rollout"

# Name of a rule: recipes over `laboratory` that break it before any other, each with words of the message.
BROKEN = {
    "surge-unused-key": [
        (
            "optim.schedule=surge optim.surge.at=5 optim.surge.window=2",
            "window has no effect with at = 5: leave it out",
        ),
    ],
    "surge-needs-schedule": [
        ("optim.schedule=cosine optim.surge.factor=2.0", "surge has no effect with schedule = 'cosine'"),
    ],
    "environment-needs-max-tokens": [("environment.name=python", "needs sampling.max_tokens")],
    "environment-excludes": [
        (f"environment.name=python sampling.max_tokens=32 {SOUP}", "[environment] and [prefix] cannot be combined"),
        (
            f"environment.name=python sampling.max_tokens=32 {LUFFY}",
            "[environment] and [demonstrations] cannot be combined",
        ),
    ],
    "prefix-unused-key": [
        (f"{SOUP} prefix.rule=entropy prefix.ratio=0.3", "ratio has no effect with rule = 'entropy'"),
        (f"{SOUP} prefix.top=4", "top has no effect with rule = 'length'"),
        (f"{SOUP} prefix.rule=my:rule prefix.whole=true", "whole has no effect with rule = 'my:rule'"),
    ],
    "server-model-unused": [
        (f"{SERVER} engine.server.kind=sglang engine.server.model=m", "model has no effect with kind = 'sglang'"),
    ],
    "server-url-twice": [
        (f"{SERVER} engine.server.urls=['http://a:1','http://b:1','http://a:1/']", "names http://a:1 twice"),
    ],
    "engine-unused-section": [
        ("engine.vllm.eager=false", "engine.vllm has no effect with engine.type = 'embedded'"),
        (f"{VLLM} engine.server.kind=sglang", 'or set engine.type = "server"'),
    ],
    "server-needs-urls": [("engine.type=server", "engine.server.urls is empty: name at least one")],
    "ray-reserves-nothing": [
        (f"{RAY} ray.engine_cpus=0", "engine_cpus and engine_gpus are both 0"),
        (f"{RAY} ray.trainer_cpus=0", "trainer_cpus and trainer_gpus are both 0"),
    ],
    "sync-exceeds-lag": [
        ("trainer.sync_every=4 trainer.max_lag=2", "makes tokens up to 3 updates old, trainer.max_lag allows 2"),
    ],
    "ray-unused": [("ray.engines=2", 'no effect with placement = "local"')],
    "ray-compare": [(f"{RAY} compare.objectives=['grpo'] compare.seeds=[0]", "compare runs on one machine")],
    "ray-workers": [(f"{RAY} engine.workers=2", "use ray.engines")],
    "ray-one-engine": [(f"{RAY} {SOUP} ray.engines=2", "[prefix] works with one engine: leave out ray.engines = 2")],
    "ray-server-engines": [(f"{RAY} {SERVER} ray.engines=2", 'ray.engines has no effect with engine.type = "server"')],
    "quantize-embedded-only": [
        (
            f"{VLLM} engine.quantize=int8",
            "engine.quantize and engine.noise need engine.type = \"embedded\"; 'vllm' has",
        ),
        (f"{SERVER} engine.noise=0.1", "'server' has options of its own"),
    ],
    "server-workers": [(f"{SERVER} engine.workers=2", "engine.workers = 2 has no effect on servers")],
    "sampling-mask-needs-top-k": [
        (SETS, "whole vocabulary with every token; set sampling.top_k"),
        (f"{SETS} sampling.top_p=0.9", "set sampling.top_k"),
    ],
    "hang-timeout-unused": [
        (
            "engine.hang_timeout=60.0",
            "engine.hang_timeout = 60 has no effect without engines in processes of their own",
        ),
        (f"{SERVER} engine.hang_timeout=60.0 trainer.max_lag=2", "engine.hang_timeout = 60"),
    ],
    "truncation-servers": [
        (f"{SERVER} sampling.top_p=0.9", "servers, which do not return sampling masks (without the sets each token"),
        (f"{SERVER} sampling.top_k=20", "by the mass that was cut): set top_p = 1"),
    ],
    "truncation-vllm": [
        (f"{VLLM} sampling.top_p=0.9", "engine.vllm.sampling_mask = true"),
        (f"{VLLM} sampling.top_k=20", "by the mass that was cut; or set top_p = 1"),
    ],
    "workers-one-engine": [
        (f"{SOUP} engine.workers=2", "[prefix] works with one engine: leave engine.workers out"),
        (f"{LUFFY} engine.workers=2", "[demonstrations] works with one engine"),
    ],
    "invariant-embedded-only": [
        (f"{INVARIANT} {VLLM}", "needs engine.type = \"embedded\": kernels of 'vllm'"),
        (f"{INVARIANT} {SERVER}", "kernels of 'server'"),
    ],
    "invariant-one-dtype": [
        (f"{INVARIANT} engine.dtype=bfloat16", 'computes in float32; set engine.dtype = "float32"'),
        (f"{INVARIANT} model.autocast=bfloat16", 'computes in bfloat16; set engine.dtype = "bfloat16"'),
    ],
    "invariant-no-quantization": [(f"{INVARIANT} engine.quantize=int4", "nothing to keep equal")],
    "invariant-no-lora": [(f"{INVARIANT} model.lora.rank=4", "trains whole weights")],
    "demonstrations-fill-group": [
        (f"{LUFFY} demonstrations.per_group=8", "per_group = 8 leaves no sampled response among 8")
    ],
    "demonstrations-truncation": [
        (f"{LUFFY} sampling.top_p=0.9", "set sampling.top_p = 1 and sampling.top_k = 0"),
        (f"{LUFFY} sampling.top_k=5", "could not be scored over them"),
    ],
    "prefix-share-divides": [(f"{SOUP} prefix.share=3", "prefix.share = 3 does not divide 8 samples")],
    "prefix-sync": [
        (f"{SOUP} trainer.sync_every=4", "leave trainer.sync_every and trainer.dynamic_sampling out"),
        (f"{SOUP} trainer.dynamic_sampling=true", "completes responses under the current policy"),
    ],
    "prefix-age-exceeds-lag": [
        (f"{SOUP} trainer.max_lag=2", "prefix.refresh = 8 makes prefixes up to 7 updates old"),
        (f"{SOUP} trainer.max_lag=7 trainer.epochs=2", "up to 14 updates old, trainer.max_lag allows 7"),
    ],
    "in-flight-needs-lag": [
        ("trainer.in_flight=discard", 'in_flight = "discard" has no effect'),
        ("trainer.in_flight=continue trainer.max_lag=0", "or set trainer.max_lag above 0"),
    ],
    "oversample-sync-only": [
        ("trainer.max_lag=3 trainer.oversample=2.0", "oversample has no effect"),
        (f"{SERVER} trainer.oversample=2.0", "oversample has no effect"),
    ],
    "lag-sync-only": [
        (f"{SOUP} prefix.refresh=2 trainer.max_lag=2", "[prefix] makes its batches synchronously"),
        (f"{LUFFY} trainer.max_lag=2", "[demonstrations] makes its batches synchronously"),
    ],
    "lag-below-one-step": [
        ("trainer.max_lag=3 trainer.minibatches=2 trainer.epochs=2", "less than the 4 updates of a step"),
    ],
    "replay-proximal-single-update": [("routing.replay=proximal", "has no effect with one update per batch")],
    "replay-rollout-engine": [
        (f"{REPLAY} {SERVER}", "servers return none"),
        (f"{REPLAY} {VLLM}", "vLLM returns them on GPUs only"),
    ],
    "replay-demonstrations": [(f"{REPLAY} {LUFFY}", "no engine ran the traces of [demonstrations]")],
    "minibatches-exceed-prompts": [("trainer.minibatches=17", "minibatches = 17 is more than trainer.prompts = 16")],
    "sharding-one-process": [
        ("sharding.offload=true", "[sharding] has no effect with one process: start several"),
        (f"{RAY} sharding.reshard=false", "or set ray.trainers"),
    ],
    "demonstrations-file": [(f"{LUFFY} demonstrations.path=absent.jsonl", "absent.jsonl': there is no such file")],
    "perturbation-needs-behavior": [
        ("objective.name=dapo perturbation.std=0.1", "[perturbation] needs an objective over the behavior policy"),
        (
            'objective.name=token-alp perturbation.std=0.1 objective.mask=[{kind="veto"}]',
            '[perturbation] needs masks over the current policy, not veto over the proximal one: set over = "current"',
        ),
    ],
    "prefix-needs-behavior": [
        ("objective.name=token-tis prefix.share=1", "[prefix] needs an objective over the behavior policy"),
        ("objective.name=another prefix.share=1 objective.name=token-tis", "not 'token-tis'"),
    ],
    "demonstrations-need-off-policy": [
        ("objective.name=grpo demonstrations.path=gold", "[demonstrations] needs an objective for tokens")
    ],
    "prefix-single-behavior": [("objective.name=oapl prefix.share=1", "'oapl' needs one behavior policy per sample")],
    "value-beta-unused": [("advantage.value_beta=1.0", "value_beta has no effect on objective 'token-tis'")],
    "lag-needs-correction": [
        *(
            (f"objective.name={name} trainer.max_lag=2", f"'{name}' tokens of older")
            for name in ("dapo", "gspo", "cispo")
        ),
        ("objective.name=dr-grpo objective.length_max=4 trainer.max_lag=2", "never reads their log-probs"),
        # A KL term that reads the behavior policy does not correct the policy term.
        ("objective.name=grpo objective.kl=unbiased objective.kl_coef=0.1 trainer.max_lag=2", "(token-tis, icepop"),
    ],
    "continue-single-behavior": [
        (
            "objective.name=oapl trainer.in_flight=continue trainer.max_lag=2",
            "'oapl' needs one behavior policy per resp",
        ),
    ],
    "refresh-every-step": [
        ("objective.name=oapl trainer.max_lag=2", "trainer.sync_every above the 1 updates of a step"),
        (
            "objective.name=oapl trainer.max_lag=8 trainer.sync_every=4 trainer.epochs=4",
            "'oapl' never trains on responses of older weights",
        ),
    ],
    "replay-proximal-needs-pass": [
        ("objective.name=token-bypass routing.replay=proximal trainer.epochs=2", "'token-bypass' has none"),
    ],
    "advantage-mismatch": [
        ("advantage.kind=optimal", "'optimal' does not fit objective 'token-tis', which expects 'grpo'"),
        ("objective.name=oapl advantage.kind=rloo", "which expects 'optimal'"),
    ],
    "dynamic-sampling-of-batch-mean": [
        (
            "objective.name=flash-reinforce trainer.dynamic_sampling=true",
            "'batch-mean' compares with the rest",
        ),
        (
            "advantage.kind=batch-mean trainer.dynamic_sampling=true",
            "dynamic_sampling replaces groups of equal",
        ),
    ],
    "single-sample": [("trainer.samples=1", "trainer.samples = 1 teaches nothing: advantage 'grpo' compares")],
    "token-advantage-of-responses": [
        (f"advantage.kind=optimal-token objective.name={name}", f"objective '{name}' judges whole responses")
        for name in ("gspo", "gmpo", "opsm", "seq-bypass")
    ],
    "top-logprobs-unread": [("sampling.top_logprobs=8", "has no effect on objective 'token-tis'")],
    "top-logprobs-needed": [
        ("objective.name=score-centering sampling.top_logprobs=0", "reads the sampler's most probable ids: set"),
    ],
    "top-logprobs-server": [(f"objective.name=score-centering {SERVER}", "which servers do not return here")],
    "task-empty": [],
    "best-metric-unknown": [
        (
            "eval.best=eval/typo/greedy",
            "'eval/typo/greedy' is not measured in this run (did you mean 'eval/sort/greedy'",
        ),
        ("eval.best=eval/sort/avg@8", "'eval/sort/avg@8' is not measured in this run (did you mean 'eval/sort/greedy'"),
        ("eval.best=eval/sort/avg@8 eval.samples=4", "(did you mean 'eval/sort/avg@4' or"),
    ],
    "eval-task-twice": [],
    "reward-name-taken": [],
    "eval-task-environment": [],
}

ACCEPTED = [
    "",
    "optim.schedule=surge optim.surge.at=5 optim.surge.period=2.0",
    f"{SOUP} prefix.rule=entropy prefix.top=4",
    f"{SOUP} prefix.refresh=1 engine.workers=1",
    f"{SOUP} trainer.sync_every=1",
    f"{LUFFY} engine.workers=0 demonstrations.per_group=7",
    "objective.name=dppo perturbation.std=0.1",
    "objective.name=dppo prefix.ratio=0.25",
    "engine.hang_timeout=60.0 engine.workers=1",
    "engine.hang_timeout=60.0 trainer.max_lag=2",
    f"engine.hang_timeout=60.0 {RAY}",
    f"{RAY} ray.trainers=2 sharding.offload=true",
    "sampling.top_p=0.9 sampling.top_k=20",
    "sampling.top_p=0.9 engine.workers=1",
    f"{SETS} sampling.top_p=0.9 sampling.top_k=20",
    "trainer.sync_every=3 trainer.max_lag=2",
    "trainer.max_lag=4 trainer.minibatches=2 trainer.epochs=2",
    "trainer.oversample=2.0 trainer.dynamic_sampling=true",
    "trainer.max_lag=2 trainer.in_flight=continue",
    "objective.name=oapl trainer.max_lag=2 trainer.sync_every=3 trainer.in_flight=discard",
    "objective.name=oapl advantage.value_beta=0.5",
    "objective.name=dapo trainer.max_lag=0",
    "advantage.kind=rloo",
    "advantage.kind=optimal-token",
    "objective.name=flash-reinforce trainer.samples=1",
    "advantage.kind=batch-mean trainer.samples=1",
    "objective.name=score-centering sampling.top_logprobs=16",
    "eval.best=eval/sort/greedy",
    "routing.replay=proximal trainer.epochs=2",
    f"{INVARIANT} engine.workers=1",
    *(
        f"objective.name={name} trainer.max_lag=2"
        for name in ("seq-tis", "token-mis", "icepop", "geo-mask", "k3-mask", "opsm", "m2po", "token-bypass")
    ),
]

EXAMPLES = [(name, overrides, words) for name, examples in BROKEN.items() for overrides, words in examples]


def unchecked(overrides: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The recipe without the rules of its loading."""
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "validate", lambda *_: None)
        return load_config("laboratory", overrides.split())


def test_every_rule_has_a_name_and_an_example() -> None:
    names = [rule.name for rules in RULES.values() for rule in rules]
    assert sorted(names) == sorted(BROKEN)


@pytest.mark.parametrize(
    ("name", "overrides", "words"), EXAMPLES, ids=[f"{name}: {text}" for name, text, _ in EXAMPLES]
)
def test_a_recipe_that_breaks_a_rule_is_refused_before_a_model_is_loaded(
    name: str, overrides: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = unchecked(overrides, monkeypatch)
    task = tasks.build(config.task.name)
    facts = Facts(config, from_section(config.objective.model_dump()), task=task)
    facts = facts._replace(eval_metrics=eval_metrics(task.name, config.eval.samples))
    broken = {rule.name: message for rules in RULES.values() for rule in rules if (message := rule.check(facts))}
    first, message = next(iter(broken.items()))
    assert first == name
    assert words in message
    # `check` loads no model: this one does not exist.
    with pytest.raises(TrimtabError) as raised:
        check(load_config("laboratory", [*overrides.split(), "model.path=/absent"]))
    assert str(raised.value).removeprefix("laboratory: ") == message
    assert "\n" not in message
    if name in {rule.name for rule in RULES["config"]}:
        with pytest.raises(TrimtabError):
            load_config("laboratory", overrides.split())
        with pytest.raises(TrimtabError):
            check(config)  # built in Python, without `load_config`


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_recipes_near_a_rule_are_accepted(overrides: str) -> None:
    check(load_config("laboratory", overrides.split())).scorer.close()


def test_sharding_is_for_several_ranks() -> None:
    config = load_config("laboratory", ["sharding.offload=true"])
    objective = from_section(config.objective.model_dump())
    validate(Facts(config, objective, world_size=2), "objective")
    with pytest.raises(TrimtabError, match=r"\[sharding\]"):
        validate(Facts(load_config("laboratory", ["sharding.offload=true", RAY]), objective, 2), "objective")


def test_a_task_without_problems_is_refused() -> None:
    config, task = load_config("laboratory"), tasks.build("sort")
    with pytest.raises(TrimtabError, match="task 'sort' has no problems to train on: lower its holdout"):
        validate(Facts(config, task=type(task)(**{**vars(task), "train": ()})), "task")


def test_a_reward_with_the_name_of_a_metric_is_refused() -> None:
    def mean(completion: str, problem: object) -> float:  # noqa: ARG001
        return 0.0

    with pytest.raises(TrimtabError, match="a reward cannot be named 'mean', a metric has that name"):
        check(load_config("laboratory"), reward=mean)
