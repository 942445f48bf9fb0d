"""Every refused combination of settings, refused in one line before a model is loaded; every key without effect."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.objectives.lookup import from_section
from trimtab.trainer import environments, requirements, rewards, run, tasks
from trimtab.trainer.config import consistency, load_config, recipe_names, recipes
from trimtab.trainer.ranks import RankGroup
from trimtab.trainer.requirements import check_recipe, task_contradictions
from trimtab.trainer.rewards import Response
from trimtab.trainer.run import build_parts
from trimtab.types import Problem

SERVER = "engine.type=server engine.server.urls=['http://a:1']"
VLLM = "engine.type=vllm"
SETS = f"{VLLM} engine.vllm.sampling_mask=true"
TEACHER = "advantage.kind=distillation model.reference=laboratory"
TOOLS = "environment.name=python sampling.max_tokens=32"
SOUP, LUFFY, RAY = "objective.name=soup", "objective.name=luffy objective.length_max=11", "placement=ray"
INVARIANT, REPLAY = "numerics=invariant", "routing.replay=rollout"

# Recipes over `laboratory` that are refused, by what their messages have in common; each with words of its message,
# whose longest part is compared as a whole below.
REFUSED = {
    "environment": [
        ("environment.name=python", "[environment] needs sampling.max_tokens"),
        (f"{TOOLS} eval.task=[{{name='sort'}}]", "[[eval.task]] is asked without the tools"),
        (f"{TOOLS} {SOUP}", "[environment] and [prefix] cannot be combined"),
        (f"{TOOLS} {LUFFY}", "[environment] and [demonstrations] cannot be combined"),
    ],
    "batches": [
        ("trainer.minibatches=17", "minibatches = 17 is more than trainer.prompts = 16"),
        ("optim.schedule=cosine optim.lr=1e-6 optim.min_lr=1e-4", "optim.min_lr = 0.0001 is above optim.lr = 1e-06"),
        ("trainer.sync_every=4 trainer.max_lag=2", "makes tokens up to 3 updates old, trainer.max_lag allows 2"),
        (f"{RAY} compare.objectives=['grpo'] compare.seeds=[0]", "compare runs on one machine"),
    ],
    "compile": [
        ("model.compile=true objective.name=token-alp", "model.compile and [perturbation], which works inside"),
        ("model.compile=true model.path=laboratory-moe routing.replay=proximal", "model.compile and routing.replay"),
        (f"model.compile=true {INVARIANT}", 'model.compile and numerics = "invariant"'),
        (f"model.compile=true {VLLM}", "model.compile and engine.vllm.eager with engine.workers = 0"),
    ],
    "proximal": [
        ("trainer.proximal=snapshot routing.replay=proximal trainer.epochs=2", 'trainer.proximal = "snapshot" scores')
    ],
    "one engine": [
        (f"{RAY} {SOUP} ray.engines=2", "[prefix] works with one engine: leave out ray.engines = 2"),
        (f"{SOUP} engine.workers=2", "[prefix] works with one engine: leave out engine.workers = 2"),
        (f"{LUFFY} engine.workers=2", "[demonstrations] works with one engine"),
        (f"{SOUP} prefix.refresh=2 trainer.max_lag=2", "[prefix] makes its batches synchronously"),
        (f"{SOUP} prefix.refresh=2 trainer.max_lag=0", "of tokens as old as prefix.refresh says"),
        (f"{LUFFY} trainer.max_lag=2", "[demonstrations] makes its batches synchronously"),
    ],
    "prefix": [
        (f"{SOUP} demonstrations.per_group=1", "[prefix] and [demonstrations] cannot be combined"),
        (f"{SOUP} prefix.share=3", "prefix.share = 3 does not divide 8 samples"),
        (f"{SOUP} trainer.sync_every=4", "leave trainer.sync_every and trainer.dynamic_sampling out"),
        (f"{SOUP} trainer.dynamic_sampling=true", "completes responses under the current policy"),
    ],
    "demonstrations": [(f"{LUFFY} demonstrations.per_group=8", "per_group = 8 leaves no sampled response among 8")],
    "engines": [
        ("engine.type=server", "engine.server.urls is empty: name at least one"),
        (f"{SERVER} engine.server.urls=['http://a:1','http://b:1','http://a:1/']", "names http://a:1 twice"),
        (f"{SERVER} engine.server.urls=['http://a/v1']", "is not the base URL of a server"),
        ("environment.name=openenv environment.url=http://a:0 sampling.max_tokens=9", "environment.url: 'http://a:0'"),
        (f"{RAY} ray.engine_cpus=0", "engine_cpus and engine_gpus are both 0"),
        (f"{VLLM} engine.quantize=int8", "engine.quantize and engine.noise need engine.type"),
        (f"{SERVER} engine.noise=0.1", "'server' has other options"),
    ],
    "invariant": [
        (f"{INVARIANT} {VLLM}", 'which engine.type = "vllm" excludes'),
        (f"{INVARIANT} {SERVER}", 'which engine.type = "server" excludes'),
        (f"{INVARIANT} engine.dtype=bfloat16", 'engine.dtype = "bfloat16" beside a trainer that computes in float32'),
        (f"{INVARIANT} model.autocast=bfloat16", 'engine.dtype = "float32" beside a trainer that computes in bfloat16'),
        (f"{INVARIANT} engine.quantize=int4", "engine.quantize or engine.noise"),
        (f"{INVARIANT} model.lora.rank=4", "model.lora.rank = 4, merged for the sampler alone"),
    ],
    "tokens": [
        (f"{SETS}", "both engine.vllm.sampling_mask = true and a sampling.top_k above 0"),
        (f"{SETS} sampling.top_p=0.9", "or both of vLLM's"),
        (f"{VLLM} sampling.top_p=0.9", "by the mass that was cut"),
        (f"{SERVER} sampling.top_p=0.9", "servers do not return it (without the sets every ratio"),
        (f"{LUFFY} sampling.top_p=0.9", "traces of [demonstrations] were not drawn from any"),
        (f"{REPLAY} {SERVER}", "servers return none"),
        (f"{REPLAY} {VLLM}", "vLLM returns them on GPUs only"),
        (f"{REPLAY} {LUFFY}", "no engine ran the traces of [demonstrations]"),
    ],
    "objective": [
        (f"{LUFFY} demonstrations.path=absent.jsonl", "absent.jsonl': there is no such file"),
        ("objective.name=grpo demonstrations.path=gold", "[demonstrations] needs an objective for tokens"),
        ("objective.name=dapo perturbation.std=0.1", "[perturbation] needs an objective over the behavior policy"),
        ("objective.name=token-tis prefix.share=1", "[prefix] needs an objective over the behavior policy"),
        ("objective.name=another prefix.share=1 objective.name=token-tis", "not 'token-tis'"),
        ('objective.name=token-alp objective.mask=[{kind="veto"}]', "masks over the current policy, not veto over"),
        ("objective.name=oapl prefix.share=1", "'oapl' needs one behavior policy per response: leave [prefix] and"),
        ("objective.name=oapl trainer.in_flight=continue trainer.max_lag=2", "'oapl' needs one behavior policy"),
        ("objective.name=gspo trainer.max_lag=2", "'gspo' tokens of older"),
        ("objective.name=dr-grpo objective.length_max=4 trainer.max_lag=2", "never reads their log-probs"),
        # A KL term that reads the behavior policy does not correct the policy term.
        ("objective.name=grpo objective.kl=unbiased objective.kl_coef=0.1 trainer.max_lag=2", "(token-tis, icepop"),
        ("routing.replay=proximal", "there is none with objective 'token-tis' and 1 updates of a batch"),
        ("objective.name=token-bypass routing.replay=proximal trainer.epochs=2", "none with objective 'token-bypass'"),
        ("objective.name=score-centering sampling.top_logprobs=0", "reads the sampler's most probable ids"),
        (f"objective.name=score-centering {SERVER}", "which servers do not return here"),
    ],
    "advantage": [
        ("advantage.kind=optimal", "'optimal' does not fit objective 'token-tis', which expects 'grpo'"),
        ("objective.name=oapl advantage.kind=rloo", "which expects 'optimal'"),
        *(
            (f"advantage.kind=optimal-token objective.name={name}", f"objective '{name}' judges whole responses")
            for name in ("gspo", "gmpo", "opsm", "seq-bypass")
        ),
        ("objective.name=flash-reinforce trainer.dynamic_sampling=true", "from which advantage 'batch-mean' learns"),
        ("advantage.kind=batch-mean trainer.dynamic_sampling=true", "dynamic_sampling replaces groups"),
        ("advantage.kind=distillation", "needs a teacher: set model.reference"),
        (f"{TEACHER} trainer.dynamic_sampling=true", "from which advantage 'distillation' learns"),
        (f"{TEACHER} objective.name=gspo", "objective 'gspo' judges whole responses"),
        (f"{TEACHER} objective.name=score-centering", "which expects 'dr-grpo'"),
        ("trainer.samples=1", "samples = 1 gives no training signal: advantage 'grpo' compares"),
    ],
    "task": [
        ("eval.best=eval/typo/greedy", "is not measured in this run (did you mean 'eval/sort/greedy'"),
        ("eval.best=eval/sort/avg@8", "'eval/sort/avg@8' is not measured in this run (did you mean 'eval/sort/greedy'"),
        ("eval.best=eval/sort/avg@8 eval.samples=4", "(did you mean 'eval/sort/avg@4' or"),
        ("eval.task=[{name='sort'}]", "two tasks would log 'eval/sort/greedy'"),
        ("eval.skip=9 task.holdout=12 eval.problems=4", "eval.skip = 9 and eval.problems = 4 exceed the 12 held-out"),
    ],
}

# Recipes over `laboratory` with a key that has no effect, and words of the warning.
UNUSED = [
    (f"{SOUP} prefix.rule=entropy prefix.ratio=0.3", 'prefix.ratio has no effect without prefix.rule = "length"'),
    (f"{SOUP} prefix.top=4", 'prefix.top has no effect without prefix.rule = "entropy"'),
    (f"{SOUP} prefix.rule=entropy prefix.whole=true", "prefix.whole has no effect"),
    (f"{SERVER} engine.server.kind=sglang engine.server.model=m", "engine.server.model has no effect"),
    ("engine.vllm.eager=false", 'engine.vllm has no effect without engine.type = "vllm"'),
    (f"{VLLM} engine.server.kind=sglang", 'engine.server has no effect without engine.type = "server"'),
    (f"{SERVER} engine.workers=2", "engine.workers has no effect without engines on this machine"),
    (f"{RAY} engine.workers=2", "engine.workers has no effect without engines on this machine"),
    ("ray.engines=2", 'ray has no effect without placement = "ray"'),
    (f"{RAY} {SERVER} ray.engines=2", "ray.engines has no effect"),
    ("engine.hang_timeout=60.0", "engine.hang_timeout has no effect without engines in separate processes"),
    (f"{SERVER} engine.hang_timeout=60.0 trainer.max_lag=2", "engine.hang_timeout has no effect"),
    ("trainer.in_flight=continue", "trainer.in_flight has no effect without trainer.max_lag above 0"),
    ("guard.every=2", "guard.every has no effect without guard.on"),
    ("guard.lr_factor=0.3", "guard.lr_factor has no effect without guard.on"),
    ("guard.times=2", "guard.times has no effect without guard.on"),
    ("trainer.refill_rounds=2", "trainer.refill_rounds has no effect without trainer.dynamic_sampling"),
    ("optim.min_lr=1e-8", 'optim.min_lr has no effect without optim.schedule = "cosine"'),
    ("model.lora.alpha=8", "model.lora has no effect without model.lora.rank above 0"),
    ("trainer.max_lag=3 trainer.minibatches=2 trainer.epochs=2", "trainer.max_lag has no effect without the updates"),
    ("trainer.proximal=snapshot", "trainer.proximal has no effect without tokens of older weights"),
    ("trainer.proximal=snapshot trainer.sync_every=4 trainer.minibatches=4", "trainer.proximal has no effect without"),
    ("objective.name=token-bypass trainer.max_lag=2 trainer.proximal=snapshot", "trainer.proximal has no effect on"),
    ("sharding.offload=true", "[sharding] has no effect with one process"),
    (f"{RAY} sharding.reshard=false", "[sharding] has no effect with one process"),
    ("advantage.value_beta=1.0", "value_beta has no effect on objective 'token-tis'"),
    ("sampling.top_logprobs=8", "top_logprobs has no effect on objective 'token-tis'"),
    ("objective.name=oapl trainer.max_lag=2", "trainer.max_lag has no effect on objective 'oapl'"),
    ("model.reference=laboratory", "model.reference has no effect on objective 'token-tis' without objective.kl_coef"),
    ("objective.name=oapl trainer.max_lag=8 trainer.sync_every=4 trainer.epochs=4", "set trainer.sync_every above"),
]

ACCEPTED = [
    "",
    f"{SOUP} prefix.rule=entropy prefix.top=4",
    f"{SOUP} prefix.refresh=1 engine.workers=1",
    f"{SOUP} trainer.sync_every=1",
    f"{LUFFY} engine.workers=0 demonstrations.per_group=7",
    "objective.name=dppo perturbation.std=0.1",
    "engine.hang_timeout=60.0 engine.workers=1",
    f"engine.hang_timeout=60.0 {RAY}",
    f"{RAY} ray.trainers=2 sharding.offload=true",
    "sampling.top_p=0.9 sampling.top_k=20",
    f"{SETS} sampling.top_p=0.9 sampling.top_k=20",
    "trainer.sync_every=3 trainer.max_lag=2",
    "trainer.max_lag=4 trainer.minibatches=2 trainer.epochs=2",
    "trainer.max_lag=2 trainer.in_flight=continue",
    "objective.name=oapl trainer.max_lag=2 trainer.sync_every=3",
    "objective.name=oapl advantage.value_beta=0.5",
    "objective.name=dapo trainer.max_lag=0",
    "objective.name=dapo trainer.max_lag=2 trainer.proximal=snapshot",
    "trainer.proximal=snapshot trainer.sync_every=4",
    "trainer.proximal=snapshot trainer.max_lag=2 routing.replay=rollout",
    "advantage.kind=optimal-token",
    f"{TEACHER} trainer.samples=1",
    "objective.kl_coef=0.1 model.reference=laboratory",
    "objective.name=flash-reinforce trainer.samples=1",
    "objective.name=score-centering sampling.top_logprobs=16",
    "eval.best=eval/sort/greedy",
    "routing.replay=proximal trainer.epochs=2",
    f"{INVARIANT} engine.workers=1",
    *(
        f"objective.name={name} trainer.max_lag=2"
        for name in ("seq-tis", "seq-mis", "icepop", "geo-mask", "k3-mask", "opsm", "m2po", "token-bypass")
    ),
]

EXAMPLES = [(group, overrides, words) for group, examples in REFUSED.items() for overrides, words in examples]
NO_PROBLEMS = "task 'sort' has no problems to train on: lower its holdout or give it more rows"
NAME_TAKEN = "a reward cannot be named 'mean', a metric has that name: rename the function"


def refusals(module: ModuleType) -> list[str]:
    """The longest text of each message with which a module refuses a recipe."""
    functions = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]
    refusing = [function for function in functions if function.name not in ("unused_keys", "_unread_keys")]
    yields = [node for function in refusing for node in ast.walk(function) if isinstance(node, ast.Yield)]
    texts = [[part.value for part in ast.walk(node) if isinstance(part, ast.Constant)] for node in yields]
    return [max((text for text in found if isinstance(text, str)), key=len) for found in texts]


@functools.cache
def refusal(overrides: str) -> str:
    """The message with which a recipe is refused, before its model, which does not exist, would be loaded."""
    with pytest.raises(TrimtabError) as raised:
        build_parts(load_config("laboratory", [*overrides.split(), "model.path=/absent"]))
    return str(raised.value)


@pytest.mark.parametrize(("group", "overrides", "words"), EXAMPLES, ids=[f"{e[0]}: {e[1]}" for e in EXAMPLES])
def test_a_contradiction_is_refused_in_one_line(
    group: str, overrides: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(overrides)
    assert words in message
    assert "\n" not in message
    # Decided by the recipe alone: when it is loaded, and again where it was built in Python.
    assert message.startswith("laboratory: ") == (group not in ("objective", "advantage", "task"))
    monkeypatch.setattr(recipes, "refuse", lambda _: None)
    with pytest.raises(TrimtabError, match=re.escape(words)):
        build_parts(load_config("laboratory", overrides.split()))


def test_refusals_are_few_and_have_examples() -> None:
    """A key without effect is a warning: refused is only what would train or report something wrong."""
    texts = refusals(consistency) + refusals(requirements)
    assert len(texts) <= 40
    messages = [refusal(overrides) for _, overrides, _ in EXAMPLES] + [NO_PROBLEMS, NAME_TAKEN]
    assert [text for text in texts if not any(text in message for message in messages)] == []


@pytest.mark.parametrize(("overrides", "words"), UNUSED, ids=[overrides for overrides, _ in UNUSED])
def test_a_key_without_effect_is_a_warning(overrides: str, words: str) -> None:
    with pytest.warns(TrimtabWarning, match=re.escape(words)) as found:
        build_parts(load_config("laboratory", overrides.split())).close()
    assert len(found) == 1


def test_one_of_several_ranks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("laboratory", ["ray.engines=2"])
    monkeypatch.setattr(requirements, "current_ranks", lambda: RankGroup(rank=1, size=2))
    check_recipe(config, from_section(config.objective.model_dump()), world_size=2)


def test_every_key_that_may_have_no_effect_has_an_example() -> None:
    warned = [words for _, words in UNUSED]
    assert [
        key for key, *_ in consistency.EFFECTS if not any(words.startswith(f"{key} has no effect") for words in warned)
    ] == []


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_recipes_near_a_rule_are_accepted(overrides: str) -> None:
    build_parts(load_config("laboratory", overrides.split())).close()


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_of_a_shipped_recipe_has_an_effect(name: str) -> None:
    config = load_config(name)
    check_recipe(config, from_section(config.objective.model_dump()), world_size=2)


def test_sharding_is_for_several_ranks() -> None:
    config = load_config("laboratory", ["sharding.offload=true"])
    check_recipe(config, from_section(config.objective.model_dump()), world_size=2)


def test_only_the_leader_keeps_the_processes_of_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(rewards.Scorer, "close", lambda _: closed.append(rank))
    for rank in (0, 1):
        monkeypatch.setattr(run, "current_ranks", lambda rank=rank: RankGroup(rank=rank, size=2))
        build_parts(load_config("laboratory"))
    assert closed == [1]


def test_an_error_ends_the_processes_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(rewards.Scorer, "close", lambda _: closed.append("scorer"))
    build = environments.build

    def build_and_record(*arguments: Any) -> environments.BuiltEnvironment:
        built = build(*arguments)
        return replace(built, close=lambda: (built.close(), closed.append("environment")))

    monkeypatch.setattr(environments, "build", build_and_record)
    with pytest.raises(TrimtabError, match="exceed the 12 held-out"):
        build_parts(load_config("laboratory", [*TOOLS.split(), "eval.skip=9", "task.holdout=12"]))
    assert closed == ["scorer", "environment"]

    def fail(*_: object) -> None:
        raise TrimtabError("no process")

    monkeypatch.setattr(run, "build_held_out", fail)
    with pytest.raises(TrimtabError, match="no process"):
        build_parts(load_config("laboratory", TOOLS.split()))
    assert closed == ["scorer", "environment"] * 2


def test_a_task_without_problems_is_refused() -> None:
    config, task = load_config("laboratory"), tasks.build("sort")
    with pytest.raises(TrimtabError, match=NO_PROBLEMS):
        consistency.refuse(task_contradictions(config, type(task)(**{**vars(task), "train": ()}), (), ()))


def test_a_reward_with_the_name_of_a_metric_is_refused() -> None:
    def mean(completion: str, problem: object) -> float:  # noqa: ARG001
        return 0.0

    with pytest.raises(TrimtabError, match=NAME_TAKEN):
        build_parts(load_config("laboratory"), reward=mean)


def test_the_length_limit_of_rewards_is_that_of_the_run() -> None:
    """Half of DAPO's penalty in the middle of the last `cache` tokens."""
    parts = build_parts(load_config("laboratory", ["sampling.max_tokens=40", 'reward=[{name="overlong", cache=20}]']))
    with parts.scorer as scorer:
        assert scorer.score([(Problem("p", "", ""), Response("", "stop", 30))])[0].total == -0.5


def test_settings_of_another_engine_are_not_read() -> None:
    config = load_config("laboratory", ["engine.vllm.context=7"])
    assert config.engine.context is None
    assert load_config("laboratory", [VLLM, "engine.vllm.context=7"]).engine.context == 7
    in_turn = load_config("laboratory", ["trainer.in_flight=continue"]).trainer
    assert (in_turn.in_flight, in_turn.unfinished) == ("continue", "finish")
