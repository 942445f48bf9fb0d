"""A planted fault: a conversation that is decoded, and encoded again, between turns. Real episodes of the real model.

The planted code does what published code does: a turn is cut at the end of its call, as text; the next one is sampled
from the text so far, encoded as a whole; the sampler's log-probs keep their places in the list, are cut to the length
of the encoded text, and padded with -1. Where a call meets its result, `>` and `<` are one token, so that every later
token is one place off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.cli.main import run as command
from trimtab.runs.trajectories import Row, write
from trimtab.trainer import environments, tasks
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.environments import BuiltEnvironment
from trimtab.trainer.environments.environment import call_tool
from trimtab.trainer.environments.formats import Tag, ToolError
from trimtab.trainer.models.load import BUNDLED, LoadedModel, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.tasks.task import BuiltTask
from trimtab.trainer.tasks.templates import FewShot
from trimtab.types import Completion, Problem, Prompt, SamplingParams, Trajectory

pytestmark = pytest.mark.slow  # the bundled model, half a minute

SHOWN = """
Question: A shop has 41 boxes of 73 nails and 568 more. How many nails are there?
Answer: In the boxes there are <python>41 * 73</python><output>2993</output> nails. \
With the others there are <python>2993 + 568</python><output>3561</output> nails. The answer is 3561

Question: A shop has 57 boxes of 38 nails and 214 more. How many nails are there?
Answer: In the boxes there are <python>57 * 38</python><output>2166</output> nails. \
With the others there are <python>2166 + 214</python><output>2380</output> nails. The answer is 2380

Question: A shop has 26 boxes of 95 nails and 731 more. How many nails are there?
Answer: In the boxes there are <python>26 * 95</python><output>2470</output> nails. \
With the others there are <python>2470 + 731</python><output>3201</output> nails. The answer is 3201

"""
PROMPTS, SAMPLES, TURNS, MAX_TOKENS = 3, 8, 3, 80
PAD = -1.0


@dataclass
class Text:
    """A conversation as text: the prompt, then pieces, each with the log-probs of its sampled tokens, if any."""

    prompt: Prompt
    pieces: list[tuple[str, np.ndarray | None, int]] = field(default_factory=list)  # text, log-probs, tokens
    ended: bool = False

    @property
    def whole(self) -> str:
        return self.prompt.text + "".join(text for text, _, _ in self.pieces)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def environment() -> Any:
    built = environments.build(EnvironmentConfig(name="python", instructions=SHOWN, max_turns=TURNS))
    yield built
    built.close()


def task_of(environment: BuiltEnvironment) -> BuiltTask:
    questions = [
        f"A shop has {17 * i + 23} boxes of {11 * i + 31} nails and {97 * i + 512} more. How many nails are there?"
        for i in range(PROMPTS)
    ]
    problems = [Problem(f"nails-{i}", question, "") for i, question in enumerate(questions)]
    return environment.adapt(BuiltTask("nails", [], problems, FewShot(()), (), ("\n",), MAX_TOKENS))


def prompts_of(task: BuiltTask, tokenizer: Any) -> tuple[list[Prompt], SamplingParams]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop=task.stop)
    return [tasks.encode(task, problem, tokenizer) for problem in task.test], sampling


def encoded_again(
    engine: EmbeddedEngine, environment: BuiltEnvironment, loaded: LoadedModel
) -> list[tuple[Prompt, Completion]]:
    """Samples turn by turn from text, as described above."""
    tokenizer, form = loaded.tokenizer, Tag(environment.tools)
    episode_prompts, sampling = prompts_of(task_of(environment), tokenizer)
    texts = [Text(prompt) for prompt in episode_prompts for _ in range(SAMPLES)]
    for turn in range(TURNS):
        going = [text for text in texts if not text.ended]
        again = [Prompt(text.prompt.problem, text.whole, encode(tokenizer, text.whole)) for text in going]
        for text, [one] in zip(going, engine.generate(again, 1, sampling, seed=turn), strict=True):
            decoded = tokenizer.decode(one.response_ids)
            call = form.parse(decoded)
            cut = decoded if call is None else decoded[: decoded.index(form.stop[0]) + len(form.stop[0])]
            text.pieces.append((cut, one.logp_behavior, len(one.response_ids)))
            text.ended = call is None or one.finish_reason == "length" or turn == TURNS - 1
            if call is not None and not text.ended:
                instance = environment.factory()
                instance.reset()
                try:
                    result = form.render(call_tool(instance, call))
                except ToolError as error:  # the model reads it, as in a run
                    result = form.render(str(error))
                text.pieces.append((result, None, len(encode(tokenizer, result))))
    return [(text.prompt, completion_of(text, tokenizer)) for text in texts]


def encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text)["input_ids"])


def completion_of(text: Text, tokenizer: Any) -> Completion:
    """The conversation encoded as a whole, with the sampler's log-probs by position."""
    tokens = tokenizer(text.whole, return_offsets_mapping=True)
    begin = len(text.prompt.ids)
    assert tokens["input_ids"][:begin] == text.prompt.ids.tolist()
    ids = np.array(tokens["input_ids"][begin:])
    places = list(chain(*([logp is not None] * len(piece) for piece, logp, _ in text.pieces)))
    offset = len(text.prompt.text)
    sampled = np.array([all(places[a - offset : b - offset]) for a, b in tokens["offset_mapping"][begin:]])
    listed = np.concatenate([np.full(n, PAD) if logp is None else logp for _, logp, n in text.pieces])
    behavior = np.full(len(ids), PAD)
    behavior[: min(len(ids), len(listed))] = listed[: len(ids)]
    return Completion(ids, behavior.astype(np.float32), np.zeros(len(ids), np.int64), "stop", "", loss_mask=sampled)


@torch.no_grad()
def saved(path: Path, loaded: LoadedModel, episodes: Sequence[tuple[Prompt, Completion]]) -> None:
    """Writes the episodes with the trainer's log-probs."""
    rows = []
    for group in range(PROMPTS):
        prompts, completions = zip(*episodes[group * SAMPLES : (group + 1) * SAMPLES], strict=True)
        batch = TokenBatch.pack([prompts[0].ids], [one.response_ids for one in completions], [0] * SAMPLES, pad_id=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp = score(loaded.model, batch).logp.float().numpy()
        for one, values in zip(completions, logp, strict=True):
            trajectory = Trajectory(prompts[0], group, one, SamplingParams(), one.sampled, 0.0, {})
            rows.append(Row(trajectory, logp_proximal=values[: len(one.response_ids)]))
    write(path, rows, step=1)


def diagnosed(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    command(["diagnose", str(path), "--out", str(path.with_suffix(".html"))])
    return capsys.readouterr().out


def test_a_conversation_encoded_again_between_turns_is_named(
    loaded: LoadedModel, environment: BuiltEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    saved(tmp_path / "again.parquet", loaded, encoded_again(engine, environment, loaded))
    printed = diagnosed(tmp_path / "again.parquet", capsys)
    assert "retokenized" in printed
    assert "the shift begins where turn 2 begins" in printed.replace("\n          ", " ")


def test_ids_that_are_appended_are_clean(
    loaded: LoadedModel, environment: BuiltEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    task = task_of(environment)
    episode_prompts, sampling = prompts_of(task, loaded.tokenizer)
    runner = environment.runner(loaded.tokenizer, MAX_TOKENS, partial(tasks.encode, task))
    groups = runner.generate(
        engine.generate, episode_prompts, SAMPLES, sampling, seed=0, reset_seeds=range(len(episode_prompts))
    )
    episodes = [(prompt, one) for prompt, group in zip(episode_prompts, groups, strict=True) for one in group]
    assert sum(int(one.turn[-1]) for _, one in episodes) > len(episodes)
    saved(tmp_path / "appended.parquet", loaded, episodes)
    printed = diagnosed(tmp_path / "appended.parquet", capsys)
    assert "retokenized" not in printed
    assert "misaligned" not in printed
