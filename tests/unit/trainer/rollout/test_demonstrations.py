"""External traces: the tokens an engine would have returned, which of them fit, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_engine import TASK
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.config import GOLD, Config
from trimtab.trainer.config.rollout_sections import DemonstrationConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.stopping import StopChecker, eos_ids
from trimtab.trainer.models.load import load
from trimtab.trainer.rollout.demonstrations import DemonstratedSampler, encode_demonstration
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.tasks.task import BuiltTask, Plain
from trimtab.types import Problem, Prompt, RewardSpec, SamplingParams

PIECES = ["?", "<eos>", "\n", "a", "b", "c", "ab"]
EOS = 1
SAMPLING = SamplingParams(max_tokens=4, stop=(".",))


def tokenizer(end: str | None) -> PreTrainedTokenizerFast:
    """Pieces of one or two letters, so that a response may be written in more than one way."""
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("ab|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token=end)


PIECE_TOKENIZER = tokenizer("<eos>")


def pieces(*names: str) -> list[int]:
    return [PIECES.index(name) for name in names]


def problem(name: str, question: str = "?", answer: str = "a") -> Problem:
    return Problem(name, question, answer)


def prompt(of: Problem, length: int = 2) -> Prompt:
    return Prompt(of, "?", np.ones(length, dtype=np.int64))


def task(*train: Problem, stop: tuple[str, ...] = ("\n",)) -> BuiltTask:
    return BuiltTask("letters", train, [], Plain(), (RewardSpec("exact"),), stop, 8)


def traces_file(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def experts(
    path: str, of: BuiltTask, *, max_tokens: int = 8, context: int | None = None, words: Any = PIECE_TOKENIZER
) -> DemonstratedSampler:
    config = Config(demonstrations=DemonstrationConfig(path=path))
    sampling = SamplingParams(max_tokens=max_tokens, stop=of.stop)
    return DemonstratedSampler.load(config, PromptStream(of, words, seed=0), sampling, context)


@pytest.mark.parametrize(
    ("stop", "text", "ids", "shown"),
    [
        (("\n",), "ab", ("ab", "\n"), "ab"),  # the stop a sampler would have drawn
        (("\n",), "ab\n", ("ab", "\n"), "ab"),
        (("\n",), "ab\n\n", ("ab", "\n"), "ab"),
        (("\n", "c"), "abca", ("ab", "c"), "ab"),
        (("\n",), "ab<eos>", ("ab", "<eos>"), "ab"),  # ended by the end token, as a sampler may
        (("\n",), "a<eos>b\n", ("a", "<eos>"), "a"),
        ((), "ab", ("ab", "<eos>"), "ab"),
        ((), "ab\n", ("ab", "\n", "<eos>"), "ab\n"),
        ((), "ab<eos>c", ("ab", "<eos>"), "ab"),
    ],
)
def test_a_trace_is_what_an_engine_would_have_returned(stop, text, ids, shown):
    sampling = SamplingParams(max_tokens=8, stop=stop)
    trace = encode_demonstration(text, PIECE_TOKENIZER, sampling)
    assert trace.response_ids.tolist() == pieces(*ids)
    assert trace.text == shown
    rule = StopChecker(PIECE_TOKENIZER, (EOS,), sampling)
    grown = [trace.response_ids[:n].tolist() for n in range(1, len(ids) + 1)]
    assert rule.ended(grown) == [False] * (len(ids) - 1) + [True]


def test_a_sampled_response_written_down_comes_back_token_for_token():
    """A real engine on the (untrained) laboratory model, ended by a stop string and by the end token."""
    model, words = load("laboratory", dtype=torch.float32)
    engine = EmbeddedEngine(model, words, torch.float32)
    sampling = SamplingParams(max_tokens=40, stop=("9",))
    prompts = [tasks.encode(TASK, TASK.train[index], words) for index in range(4)]
    ended = [c for group in engine.generate(prompts, 8, sampling, seed=0) for c in group if c.finish_reason == "stop"]
    assert {int(completion.response_ids[-1]) for completion in ended} == {
        9,
        *eos_ids(words, model.config, model.generation_config),
    }
    for completion in ended:
        whole = words.decode(completion.response_ids)
        trace = encode_demonstration(whole, words, sampling)
        assert trace.response_ids.tolist() == completion.response_ids.tolist()
        assert trace.text == completion.text


def take(source: DemonstratedSampler, request: Prompt, count: int, turn: int) -> tuple[list[str], int, int]:
    """The texts of the traces, and how many were too long or missing."""
    stats = RolloutStats()
    traces = source.take(request, count, turn, stats)
    return [trace.text for trace in traces], stats.traces_dropped, stats.traces_missing


def test_a_task_without_written_answers_has_no_gold():
    source = experts(GOLD, task(problem("x", answer="")))
    assert take(source, prompt(problem("x", answer="")), 1, 0) == ([], 0, 1)


def test_what_exceeds_the_response_limit_or_the_context_is_dropped_and_counted():
    request = prompt(problem("x", answer="aba"), length=5)  # "ab" "a" and the stop: three tokens
    for max_tokens, context, fits in ((3, None, True), (2, None, False), (8, 8, True), (8, 7, False), (2, 8, False)):
        source = experts(GOLD, task(request.problem), max_tokens=max_tokens, context=context)
        assert take(source, request, 1, 0) == (["aba"] * fits, not fits, 0)


def test_rows_are_found_by_id_before_question(tmp_path):
    known = [problem("x", "one"), problem("one", "two"), problem("y", "three")]
    rows = [{"prompt": "one", "response": "a", "source": "ignored"}, {"prompt": " three\n", "response": "b"}]
    source = experts(traces_file(tmp_path / "t.jsonl", rows), task(*known))
    assert [take(source, prompt(request), 1, 0)[0] for request in known] == [["a"], ["a"], ["b"]]
    rows.append({"prompt": "x", "response": "c"})
    source = experts(traces_file(tmp_path / "t.jsonl", rows), task(*known))
    assert take(source, prompt(known[0]), 1, 0)[0] == ["c"]
    assert take(source, prompt(problem("z", "four")), 1, 0) == ([], 0, 1)


def test_several_traces_of_a_prompt_take_turns(tmp_path):
    request = prompt(problem("x"))
    rows = [{"prompt": "x", "response": text} for text in ("a", "b", "c")]
    source = experts(traces_file(tmp_path / "t.jsonl", rows), task(request.problem))
    assert [take(source, request, 1, turn)[0] for turn in range(4)] == [["a"], ["b"], ["c"], ["a"]]
    assert [take(source, request, 2, turn)[0] for turn in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert take(source, request, 5, 1)[0] == ["c", "a", "b"]  # none twice in a group
    assert take(source, request, 1, 2)[0] == ["c"]  # a function of its arguments: resuming repeats it


def test_a_dropped_trace_leaves_its_place_to_the_next(tmp_path):
    request = prompt(problem("x"))
    rows = [{"prompt": "x", "response": text} for text in ("aaaaaaaa", "b")]
    source = experts(traces_file(tmp_path / "t.jsonl", rows), task(request.problem), max_tokens=4)
    assert take(source, request, 1, 0) == (["b"], 1, 0)
    assert take(source, request, 1, 1) == (["b"], 0, 0)  # not due: not read
    assert take(source, request, 2, 0) == (["b"], 1, 0)


GOOD = {"prompt": "x", "response": "a"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, "{broken\n"], r"t\.jsonl cannot be read from row 2 on"),
        ([GOOD, {"prompt": "x", "respons": "a"}], r"row 2: no column 'response' \(did you mean 'respons'"),
        ([{"response": "a"}], r"row 1: no column 'prompt'"),
        ([GOOD, {"prompt": "x", "response": 5}], r"row 2: column 'response' has no text"),
        ([GOOD, {"prompt": "x", "response": " \n"}], r"row 2: column 'response' has no text"),
        ([GOOD, {"prompt": "", "response": "a"}], r"row 2: column 'prompt' has no text"),
        ([GOOD, {"prompt": "x", "response": "a\nb"}], r"row 2: 'b' follows what ends a sampled response \('\\n' or"),
        ([GOOD, {"prompt": "x", "response": "a<eos>b"}], r"row 2: 'b' follows what ends"),
        ([{"prompt": "elsewhere", "response": "a"}], r"t\.jsonl: no prompt is the id or the question .*'letters'"),
    ],
)
def test_unusable_files_are_one_line_with_file_and_row(tmp_path, rows, message):
    with pytest.raises(TrimtabError, match=message) as error:
        experts(traces_file(tmp_path / "t.jsonl", rows), task(problem("x")))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TrimtabError, match=r"cannot read .*none\.jsonl"):
        experts(str(tmp_path / "none.jsonl"), task(problem("x")))
    with pytest.raises(TrimtabError, match="unknown kind of file"):
        experts("golden", task(problem("x")))


def test_responses_without_an_end_are_refused():
    with pytest.raises(TrimtabError, match="no stop string and the tokenizer no end token"):
        experts(GOLD, task(problem("x"), stop=()), words=tokenizer(None))
