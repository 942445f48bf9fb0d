"""Measures the bases of `diagnosis_zoo.py`: log-probs of sampler and trainer, saved as benchmarks/zoo/bases/*.parquet.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/zoo_bases.py [NAME ...]
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/zoo_bases.py vllm

NAME is one of laboratory, drift, mixture, smollm2, settings, tools, trained, computed, vllm; without one all but vllm
are measured, in an hour on one idle core. A stream is named by base, kind and strength, as `zoo.synthetic` names its
own:

* plain: sampled at temperature 1; cold: at another; cut: with top-p; turns: with a tool and its results
* aged: of weights some updates old, with their versions; steps: of weights that never arrive, while versions say so
* cached: of new weights over keys and values that old weights left in the prefix cache
* computed: other trainers, each with one thing changed, beside the right one
* routed: a mixture of experts, with the trainer's log-probs under the sampler's experts beside its own
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from routing import draw
from trimtab.trainer import environments, tasks
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import EnvironmentConfig, load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import NO_QUANTIZATION, WeightQuantization
from trimtab.trainer.models.load import BUNDLED, LoadedModel, load
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.sharding import named_weights
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Problem, Prompt, SamplingParams
from turns import MAX_TOKENS, SHOWN, nails
from zoo.bases import FOLDER, read
from zoo.measuring import (
    Response,
    Training,
    centered,
    flat,
    plain_model,
    responses_of,
    sample_with_cache,
    save,
    stream,
    train,
)
from zoo.streams import Stream, joined
from zoo.synthetic import COLD, CUT, RESTART, STEPS

SPACING = (1, 3, 8)
"""Updates of the laboratory model between two steps, weakest first."""
AGES = 4
SAMPLERS = {
    "float32": ("float32", NO_QUANTIZATION),
    "bfloat16": ("bfloat16", NO_QUANTIZATION),
    "int8": ("float32", WeightQuantization(bits=8)),
    "int4": ("float32", WeightQuantization(bits=4)),
}
SUBJECTS = (
    *("a lighthouse keeper", "the color of the sky", "lentils", "prime numbers", "the moon", "bread", "a lost dog"),
    *("glaciers", "the first computers", "a chess game", "honey", "trains at night", "volcanoes", "a market in spring"),
    *("the Nile", "knots", "a broken clock", "owls", "tea", "the number zero", "bridges", "an old piano"),
)
ASKED = ("Write a short story about {}.", "Explain {} to a child.")
TEXT = SamplingParams(max_tokens=48, top_logprobs=1)


@cache
def smollm2() -> LoadedModel:
    return load(BUNDLED, dtype=torch.float32)


@cache
def prose() -> list[Prompt]:
    tokenizer = smollm2().tokenizer
    prompts = []
    for number, question in enumerate(asked.format(subject) for asked in ASKED for subject in SUBJECTS):
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(Problem(f"p{number}", question, ""), text, ids))
    return prompts


def sampled(
    loaded: LoadedModel, sampler: str, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams
) -> list:
    dtype, rounding = SAMPLERS[sampler]
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, getattr(torch, dtype), quantization=rounding)
    return responses_of(prompts, engine.generate(prompts, samples, sampling, seed=3))


def measure_smollm2() -> None:
    """Text of 48 tokens, sampled four ways and scored in float32."""
    loaded, trainer = smollm2(), plain_model(smollm2().model)
    for sampler in SAMPLERS:
        responses = sampled(loaded, sampler, prose(), 3, TEXT)
        save(f"smollm2-{sampler}.plain", stream(responses, trainer, TEXT, conditions=True))


def measure_settings() -> None:
    """The same at other temperatures and with top-p."""
    loaded, trainer = smollm2(), plain_model(smollm2().model)
    for sampler, levels in (("bfloat16", (0, 1, 2)), ("float32", (1,))):
        raw = plain_model(loaded.model, getattr(torch, sampler))
        for level in levels:
            for kind, setting in (("cold", {"temperature": COLD[level]}), ("cut", {"top_p": CUT[level]})):
                sampling = SamplingParams(max_tokens=48, **setting)
                responses = sampled(loaded, sampler, prose(), 3, sampling)
                save(f"smollm2-{sampler}.{kind}{level}", stream(responses, trainer, sampling, sampler=raw))


def measure_tools() -> None:
    """Word problems with a Python interpreter, up to three turns, sampled in bfloat16."""
    loaded = smollm2()
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    environment = environments.build(EnvironmentConfig(name="python", instructions=SHOWN, max_turns=3))
    task = environment.adapt(nails(24))
    prompts = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.test]
    runner = environment.runner(loaded.tokenizer, MAX_TOKENS, partial(tasks.encode, task))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop=task.stop, top_logprobs=1)
    groups = runner.generate(engine.generate, prompts, 5, sampling, seed=0, reset_seeds=range(len(prompts)))
    environment.close()
    responses = responses_of(prompts, groups)
    save("smollm2-bfloat16.turns", stream(responses, plain_model(loaded.model), sampling, turns=True))


def measure_trained() -> None:
    """SmolLM2 while it learns to write the letter e: old weights, weights that never arrive, a stale prefix cache."""
    loaded, prompts, first = smollm2(), prose(), plain_model(smollm2().model)

    def batch(model: Any, update: int) -> tuple[list[Response], np.ndarray]:
        part = [prompts[(6 * update + i) % len(prompts)] for i in range(6)]
        engine = EmbeddedEngine(_with_weights(loaded.model, model), loaded.tokenizer, torch.bfloat16)
        groups = engine.generate(part, 4, TEXT, seed=update)
        reward = np.array([one.text.count("e") for one in flat(groups)], dtype=np.float64)
        return responses_of(part, groups), centered(reward, 4)

    updates = (0, 2, 4, 6)
    training = train(first, updates[-1], 2e-5, batch, updates)
    models = {update: training.model(first, update) for update in updates}

    def drawn(update: int, samples: int, part: Sequence[Prompt]) -> list[Response]:
        engine = EmbeddedEngine(_with_weights(loaded.model, models[update]), loaded.tokenizer, torch.bfloat16)
        return responses_of(part, engine.generate(part, samples, TEXT, seed=11 + update))

    last = stream(drawn(6, 3, prompts), models[6], TEXT, autocast=True, conditions=True)
    save("smollm2-trained.plain", last)
    parts = [stream(drawn(own, 1, prompts), models[6], TEXT) for own in (6, 4, 2, 0)]
    steps = zip(parts, (6, 4, 2, 0), strict=True)
    save("smollm2-bfloat16.aged1", joined([versioned(part, 6, own, 6) for part, own in steps]))
    parts = [stream(drawn(0, 1, prompts[11 * step :][:33]), models[own], TEXT) for step, own in enumerate(updates)]
    save("smollm2-bfloat16.steps1", joined([versioned(part, i, i, i) for i, part in enumerate(parts)]))
    samplers = {update: plain_model(model, torch.bfloat16) for update, model in models.items()}
    shared = _shared_prefix([prompt.ids for prompt in prompts])
    save(
        "smollm2-bfloat16.cached1",
        cached([models[u] for u in updates], [samplers[u] for u in updates], prompts, 2, 22, TEXT, shared, restart=2),
    )


def _with_weights(loaded: Any, model: Any) -> Any:
    """The loaded model, with the weights of a plain copy."""
    loaded.load_state_dict(model.state_dict())
    return loaded


def _shared_prefix(prompts: Sequence[np.ndarray]) -> int:
    shortest = min(len(ids) for ids in prompts)
    same = np.all([ids[:shortest] == prompts[0][:shortest] for ids in prompts], axis=0)
    return int(np.argmin(same))


def versioned(part: Stream, step: int, version: int, proximal: int) -> Stream:
    part.rows.update(step=np.full(part.responses, step), proximal_version=np.full(part.responses, proximal))
    return part.changed(version=np.full(len(part), version, dtype=np.int32))


def cached(
    trainers: Sequence[Any],
    samplers: Sequence[Any],
    prompts: Sequence[Prompt],
    samples: int,
    asked: int,
    sampling: SamplingParams,
    shared: int,
    *,
    restart: int,
) -> Stream:
    """Steps of an engine that keeps its prefix cache over publications and is restarted once.

    Every step asks some of the prompts. A prompt that was asked before is cached whole, any other up to `shared`.
    """
    random, parts, first = np.random.default_rng(8), [], {}
    for step, (trainer, sampler) in enumerate(zip(trainers, samplers, strict=True)):
        begun = restart if step >= restart else 0
        for number in random.permutation(len(prompts))[:asked]:
            seen = first.setdefault((int(number), begun), step)
            length, by = (len(prompts[number].ids), seen) if seen < step else (shared, begun)
            group = sample_with_cache(
                sampler, samplers[by], prompts[number].ids, length, samples, sampling, 1000 * step + int(number)
            )
            rows = {"prompt": int(number), "cluster": int(number), "prompt_length": len(prompts[number].ids)}
            responses = [Response(prompts[number].ids, one, rows) for one in group]
            parts.append(versioned(stream(responses, trainer, sampling), step, step, step))
    return joined(parts)


@cache
def sorting() -> tuple[LoadedModel, list[Prompt], SamplingParams]:
    loaded, task = load(str(laboratory_folder()), dtype=torch.float32), tasks.build("sort")
    prompts = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.train[:600]]
    end = tuple(loaded.tokenizer(stop, add_special_tokens=False)["input_ids"][-1] for stop in task.stop)
    return loaded, prompts, SamplingParams(max_tokens=task.max_tokens, stop_ids=end, top_logprobs=1)


def measure_laboratory() -> None:
    """Ten digits sorted by a model of 393,000 parameters, sampled three ways, at other temperatures and with top-p."""
    loaded, prompts, sampling = sorting()
    first = plain_model(loaded.model)
    for sampler in ("float32", "bfloat16", "int4"):
        responses = sampled(loaded, sampler, prompts[:300], 4, sampling)
        save(f"laboratory-{sampler}.plain", stream(responses, first, sampling, conditions=True))
    for level in range(3):
        for kind, setting in (("cold", {"temperature": COLD[level]}), ("cut", {"top_p": CUT[level]})):
            other = SamplingParams(max_tokens=sampling.max_tokens, stop_ids=sampling.stop_ids, **setting)
            responses = sampled(loaded, "float32", prompts[:160], 4, other)
            save(f"laboratory-float32.{kind}{level}", stream(responses, first, other, sampler=first))


def measure_drift() -> None:
    """The same model over 88 updates of training: old weights, weights that never arrive, a stale prefix cache."""
    loaded, prompts, sampling = sorting()
    first = plain_model(loaded.model)

    def batch(model: Any, update: int) -> tuple[list[Response], np.ndarray]:
        part = [prompts[(16 * update + i) % len(prompts)] for i in range(16)]
        engine = EmbeddedEngine(_with_weights(loaded.model, model), loaded.tokenizer, torch.float32)
        groups = engine.generate(part, 8, sampling, seed=update)
        right = [list(one.text[:10]) == sorted(one.text[:10]) for one in flat(groups)]
        return responses_of(part, groups), centered(np.array(right, dtype=np.float64), 8)

    count = max(SPACING) * (STEPS + AGES - 1)
    training = train(first, count, 1e-4, batch, range(count + 1))
    last = training.model(first, count)
    own = loaded._replace(model=_with_weights(loaded.model, last))
    responses = sampled(own, "bfloat16", prompts[300:], 4, sampling)
    save("laboratory-trained.plain", stream(responses, last, sampling, conditions=True))
    for level, spacing in enumerate(SPACING):
        models = [training.model(first, spacing * step) for step in range(STEPS)]
        samplers = [plain_model(model, torch.bfloat16) for model in models]
        kept = cached(models, samplers, prompts[:40], 4, 20, sampling, 0, restart=RESTART)
        save(f"laboratory-bfloat16.cached{level}", kept)
    for sampler in ("bfloat16", "int4"):
        for level, spacing in enumerate(SPACING):
            save(f"laboratory-{sampler}.aged{level}", aged(training, first, sampler, spacing))
            save(f"laboratory-{sampler}.steps{level}", undelivered(training, first, sampler, spacing))


def aged(training: Training, like: Any, sampler: str, spacing: int) -> Stream:
    loaded, prompts, sampling = sorting()
    parts = []
    for step in range(STEPS):
        now = spacing * (step + AGES - 1)
        for age in range(AGES):
            own = _with_weights(loaded.model, training.model(like, now - spacing * age))
            part = prompts[(5 * (AGES * step + age)) % 500 :][:5]
            responses = sampled(loaded._replace(model=own), sampler, part, 4, sampling)
            found = stream(responses, training.model(like, now), sampling)
            parts.append(versioned(found, step, now - spacing * age, now))
    return joined(parts)


def undelivered(training: Training, like: Any, sampler: str, spacing: int) -> Stream:
    loaded, prompts, sampling = sorting()
    own = _with_weights(loaded.model, training.model(like, 0))
    parts = []
    for step in range(STEPS):
        responses = sampled(loaded._replace(model=own), sampler, prompts[20 * step :][:20], 4, sampling)
        parts.append(versioned(stream(responses, training.model(like, spacing * step), sampling), step, step, step))
    return joined(parts)


def measure_mixture() -> None:
    """A mixture of 16 experts of which one sees a token, sampled in bfloat16."""
    loaded = load(str(laboratory_folder("laboratory-switch")), dtype=torch.float32)
    drawn = draw(loaded, "bfloat16", NO_QUANTIZATION, 256, 8)
    real = drawn.batch.response_mask
    with torch.no_grad():
        free = score(loaded.model, drawn.batch).logp[real].double().numpy()
        replayed = score(loaded.model, drawn.batch, routes=drawn.record).logp[real].double().numpy()
    ids = drawn.batch.response_ids[real].numpy().astype(np.int32)
    tokens = {"ids": ids, "behavior": drawn.logp.numpy(), "trainer": free, "replayed": replayed}
    starts = np.append(0, np.cumsum(real.sum(-1).numpy()))
    save("mixture-bfloat16.plain", Stream(starts, tokens, {"prompt": drawn.batch.prompt_index.numpy()}))


def measure_vllm() -> None:
    """The same text as `smollm2`, sampled by vLLM in bfloat16."""
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    loaded, trainer = smollm2(), plain_model(smollm2().model)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "model"
        save_model_files(loaded.model, loaded.tokenizer, files)
        engine = VllmEngine(files, loaded.tokenizer, load_config("quickstart-vllm").engine)
        try:
            engine.update_weights(named_weights(loaded.model), 0)
            responses = responses_of(prose(), engine.generate(prose(), 3, TEXT, seed=3))
        finally:
            engine.close()
    save("vllm-bfloat16.plain", stream(responses, trainer, TEXT, conditions=True))


def _theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = 50_000 ** (-torch.arange(0, 64, 2) / 64)


def _one_layer(model: Any) -> None:
    random = torch.Generator().manual_seed(7)
    for module in model.model.layers[15].modules():
        if isinstance(module, torch.nn.Linear):
            noise = torch.randn(module.weight.shape, generator=random)
            module.weight.data += 0.1 * module.weight.std() * noise


CHANGED: dict[str, tuple[Callable[[Any], None], int]] = {
    "rope: base": (_theta, 0),
    "one layer old": (_one_layer, 0),
    "another template": (lambda _model: None, 22),
}
"""What is changed in the model, and how many tokens before the question (the system message) are left out, by kind."""


@torch.inference_mode()
def measure_computed() -> None:
    """A sixth of the responses of `smollm2` in bfloat16, scored by trainers with one thing changed (`zoo.kinds`)."""
    whole = read(FOLDER / "smollm2-bfloat16.plain.parquet")
    sampled = whole.take(np.arange(0, whole.responses, 6))
    ids = np.split(sampled["ids"], sampled.starts[1:-1])
    asked = [prose()[number].ids for number in sampled.rows["prompt"]]
    found = {"behavior": sampled["behavior"], "trainer": sampled["trainer"]}
    for name, (change, first) in CHANGED.items():
        model = plain_model(smollm2().model)
        change(model)
        parts = []
        for prompt, response in zip(asked, ids, strict=True):
            row = torch.from_numpy(np.append(prompt[first:], response))
            scores = model(row[None, :-1], logits_to_keep=len(response)).logits[0]
            logps = torch.log_softmax(scores.double(), -1)
            parts.append(logps.gather(1, row[-len(response) :, None])[:, 0].numpy())
        found[name] = np.concatenate(parts)
        print(name, sampled.changed(trainer=found[name]).k3, flush=True)
    save("computed/smollm2", Stream(sampled.starts, {"ids": sampled["ids"], **found}, sampled.rows))


PARTS = (
    *(measure_laboratory, measure_drift, measure_mixture, measure_smollm2, measure_settings),
    *(measure_tools, measure_trained, measure_computed, measure_vllm),
)
MEASURED = {part.__name__.removeprefix("measure_"): part for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MEASURED, []], metavar="NAME")
    names = parser.parse_args().names or [name for name in MEASURED if name != "vllm"]
    torch.set_num_threads(1)
    for name in names:
        MEASURED[name]()


if __name__ == "__main__":
    main()
