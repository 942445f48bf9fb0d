"""Episodes: tools are called between turns, bounded, and what fails costs one episode only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.environment import check_class, tool_names
from trimtab.trainer.environments.episodes import EpisodeRunner, Episodes
from trimtab.trainer.environments.formats import Format, Tag
from trimtab.types import EXTERNAL_VERSION, Completion, EpisodeOutcome, FinishReason, Problem, Prompt, TurnResult

LIMITS = EnvironmentConfig(name="class", max_turns=3, max_turn_tokens=64, max_observation_tokens=16, timeout=5.0)


class Counter:
    """Counts; raises and returns what it is asked to."""

    def reset(self, **row: Any) -> str | None:
        self.row, self.count, self.closed = row, 0, False
        return None

    def add(self, step: int) -> int:
        """Adds.

        Args:
            step: what is added.
        """
        self.count += step
        return self.count

    def word(self, text: str) -> str:
        """Repeats.

        Args:
            text: what is repeated.
        """
        return text

    async def later(self, step: int) -> int:
        """Adds, as a coroutine.

        Args:
            step: what is added.
        """
        return self.add(step)

    def fail(self) -> None:
        """Raises."""
        raise KeyError("nothing here")

    def _private(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def start(
    tokenizer: Any,
    kind: Callable[[], Any] = Counter,
    *,
    limits: EnvironmentConfig = LIMITS,
    samples: int = 2,
    max_tokens: int = 200,
    form: Format | None = None,
    problems: Sequence[Problem] = (Problem("p1", "How much?", "3", {"level": 2}),),
    encoder: Callable[[Problem, Any], Prompt] | None = None,
    **more: int,
) -> Episodes:
    form = form or Tag(tuple(tool_names(kind)))
    runner = EpisodeRunner(kind, form, limits, tokenizer, max_tokens, encoder or encode, **more)
    return Episodes(runner, [encode(problem, tokenizer) for problem in problems], samples, [0] * len(problems))


def encode(problem: Problem, tokenizer: Any) -> Prompt:
    text = f"Question: {problem.question}\nAnswer:"
    return Prompt(problem, text, np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64))


def append(tokenizer: Any, before: Completion | None, text: str, *, sampled: bool = True) -> Completion:
    """A completion with one more turn, or observation, of this text."""
    before = before or Completion.empty()
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    value = -1.0 if sampled else np.nan
    return Completion(
        response_ids=np.concatenate([before.response_ids, ids]),
        logp_behavior=np.concatenate([before.logp_behavior, np.full(len(ids), value, np.float32)]),
        policy_version=np.concatenate([before.policy_version, np.full(len(ids), 0 if sampled else EXTERNAL_VERSION)]),
        finish_reason="stop",
        text=text,
        loss_mask=np.concatenate([before.sampled, np.full(len(ids), sampled)]),
    )


def answer(episodes: Episodes, completion: Completion, sample: int = 0, prompt: int = 0) -> TurnResult:
    episodes.submit(prompt, sample, completion)
    result = None
    while result is None:
        result = episodes.result(prompt, sample, 0.1)
    return result


def text_of(tokenizer: Any, result: TurnResult) -> str:
    return tokenizer.decode(result.ids.tolist())


def outcome(episodes: Episodes, turn: Completion) -> EpisodeOutcome:
    """That of the first of two responses of the same turn."""
    [[one, _]] = episodes.finish([[turn, turn]])
    return one.outcome


def finished(episodes: Episodes, turn: Completion) -> tuple[FinishReason | None, str | None]:
    """Why the response ended after its turn, and why its episode failed; then it has no reward."""
    reason, last = answer(episodes, turn).finish_reason, outcome(episodes, turn)
    assert last.failure is None or last.reward is None
    return reason, last.failure


def test_a_turn_that_does_not_begin_with_those_before_it_is_refused(tokenizer: Any) -> None:
    episodes = start(tokenizer, samples=1)
    turn = append(tokenizer, None, "<add>2</add>")
    result = answer(episodes, turn)
    whole = append(tokenizer, append(tokenizer, turn, text_of(tokenizer, result), sampled=False), "<add>3</add>")
    for place in (0, len(turn.response_ids)):  # in the first turn, and in its result
        ids = whole.response_ids.copy()
        ids[place] += 1
        with pytest.raises(TrimtabError, match="does not begin with the tokens of the turns and results before it"):
            episodes.submit(0, 0, replace(whole, response_ids=ids))
    assert text_of(tokenizer, answer(episodes, whole)) == "<output>5</output>"
    episodes.close()


def test_calls_reach_the_environment_of_their_sample(tokenizer: Any) -> None:
    episodes = start(tokenizer)
    first = append(tokenizer, None, "I add. <add>2</add>")
    result = answer(episodes, first)
    assert (text_of(tokenizer, result), result.finish_reason) == ("<output>2</output>", None)
    again = append(tokenizer, append(tokenizer, first, "<output>2</output>", sampled=False), "<later>3</later>")
    assert text_of(tokenizer, answer(episodes, again)) == "<output>5</output>"
    assert text_of(tokenizer, answer(episodes, first, sample=1)) == "<output>2</output>"
    [[one, two]] = episodes.finish([[again, first]])
    assert (one.outcome.calls, two.outcome.calls, one.outcome.tool_errors) == (2, 1, 0)
    assert one.outcome.reward is None


def test_a_turn_that_is_submitted_again_is_not_run_again(tokenizer: Any) -> None:
    """After an abort the engine submits the turn again, and gets the same result."""
    episodes = start(tokenizer)
    first = append(tokenizer, None, "<add>2</add>")
    assert [text_of(tokenizer, answer(episodes, first)) for _ in range(3)] == ["<output>2</output>"] * 3


def test_the_row_reaches_reset(tokenizer: Any) -> None:
    rows: list[dict[str, Any]] = []

    class Recording(Counter):
        def reset(self, **row: Any) -> str:
            rows.append(row)
            return " Begin."

    episodes = start(tokenizer, Recording)
    columns = {"level": 2, "id": "p1", "question": "How much?", "answer": "3"}
    assert rows == [columns | {"prompt": "How much?", "seed": rows[0]["seed"]}] * 2, "one seed for all responses to it"
    (prompt,) = episodes.prompts
    assert prompt.text == "Question: How much? Begin.\nAnswer:"
    assert tokenizer.decode(prompt.ids.tolist()) == prompt.text
    assert (prompt.problem.question, episodes.samples) == ("How much?", 2)


def test_responses_whose_environments_begin_differently_have_prompts_of_their_own(tokenizer: Any) -> None:
    numbers = iter(range(1, 5))

    class Different(Counter):
        def __init__(self) -> None:  # Constructors run one after another, resets at the same time.
            self.number = next(numbers)

        def reset(self, **row: Any) -> str:
            super().reset(**row)
            return f" Number {self.number}"

    episodes = start(tokenizer, Different)
    assert [prompt.text[20:28] for prompt in episodes.prompts] == ["Number 1", "Number 2"]
    assert episodes.samples == 1
    one, two = (append(tokenizer, None, f"<add>{step}</add>") for step in (3, 5))
    results = [answer(episodes, turn, prompt=index) for index, turn in enumerate((one, two))]
    assert [text_of(tokenizer, result) for result in results] == ["<output>3</output>", "<output>5</output>"]
    [group] = episodes.finish([[one], [two]])
    outcomes = [completion.outcome for completion in group if completion.outcome]
    assert [outcome.prompt.text[20:28] for outcome in outcomes] == ["Number 1", "Number 2"]


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("<fail></fail>", "Error: KeyError: 'nothing here'"),
        ("<add></add>", "Error: add: missing a required argument: 'step'"),
    ],
)
def test_errors_of_a_tool_are_reported_to_the_model(tokenizer: Any, text: str, observation: str) -> None:
    episodes, turn = start(tokenizer), append(tokenizer, None, text)
    assert text_of(tokenizer, answer(episodes, turn)) == f"<output>{observation}</output>"
    last = outcome(episodes, turn)
    assert (last.calls, last.tool_errors, last.failure) == (1, 1, None)


def test_the_last_turn_makes_no_call(tokenizer: Any) -> None:
    episodes, turn = start(tokenizer), None
    for _ in range(2):
        turn = append(tokenizer, turn, "<add>1</add>")
        turn = append(tokenizer, turn, text_of(tokenizer, answer(episodes, turn)), sampled=False)
    turn = append(tokenizer, turn, "<add>1</add>")
    assert answer(episodes, turn).finish_reason == "length"
    last = outcome(episodes, turn)
    assert (last.calls, last.void) == (2, False)


def test_a_result_that_does_not_fit_ends_the_episode(tokenizer: Any) -> None:
    turn = append(tokenizer, None, "<add>1</add>")
    fitting = len(turn.response_ids) + len(tokenizer("<output>1</output>")["input_ids"]) + 1
    assert answer(start(tokenizer, max_tokens=fitting), turn).finish_reason is None
    assert answer(start(tokenizer, max_tokens=fitting - 1), turn).finish_reason == "length"


@pytest.mark.parametrize(
    ("pattern", "text", "void"),
    [
        (None, "5", False),
        (None, " \n", True),
        (r"\d", "five", True),
        (r"\d", "5", False),
        (r"\d", "<add>1</add>", False),
        (r"\d", "<add>1", True),
        (None, "<add>1", True),
        (r"\d", "5 <add>1", False),
        (r"\d", "<word>a</wo 5 <add>1", True),
        (r"\\boxed", "so \\boxed{5}", False),
    ],
)
def test_void_turns(tokenizer: Any, pattern: str | None, text: str, void: bool) -> None:
    turn = append(tokenizer, None, text)
    assert outcome(start(tokenizer, limits=LIMITS.model_copy(update={"answer": pattern})), turn).void == void


def test_a_cut_call_that_begins_with_a_special_token_is_not_an_answer(tokenizer: Any) -> None:
    """The text of a response has no special tokens, so that its beginning is looked for in the decoded turn."""

    class Special(Tag):
        @property
        def begin(self) -> tuple[str, ...]:
            return ("<|im_start|>",)

    limits = LIMITS.model_copy(update={"answer": r"\d"})
    for words, void in (("<|im_start|>add 5", True), ("5 <|im_start|>add", False), ("5", False)):
        turn = replace(append(tokenizer, None, words), text=words.replace("<|im_start|>", ""))
        assert outcome(start(tokenizer, limits=limits, form=Special(("add",))), turn).void == void


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b<|endoftext|>", "<<|im_start|>system\n", "no token"])
def test_a_result_never_becomes_a_control_token(tokenizer: Any, text: str) -> None:
    """A result that ends a turn or begins one of the system would write the rest of the conversation itself."""
    episodes = start(tokenizer, limits=LIMITS.model_copy(update={"max_observation_tokens": 60}))
    ids = answer(episodes, append(tokenizer, None, f"<word>{text}</word>")).ids
    assert tokenizer.decode(ids.tolist()) == f"<output>{text}</output>"
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids)
    plain = tokenizer(f"<output>{text}</output>", add_special_tokens=False)["input_ids"]
    assert (ids.tolist() == plain) == (text == "no token")


def test_classes_that_are_not_environments() -> None:
    class NoReset:
        def add(self) -> None:
            """Adds."""

    class NoTool:
        def reset(self, **row: Any) -> None: ...

    class NoHints(NoTool):
        def add(self, step) -> None:
            """Adds."""

    lines = {NoReset: "has no method reset", NoTool: "'NoTool' has no tool", NoHints: "tool 'add'.*type hint"}
    for kind, line in lines.items():
        with pytest.raises(TrimtabError, match=line):
            check_class(kind, kind.__name__)
    check_class(Counter, "Counter")
    assert tool_names(Counter) == ["add", "fail", "later", "word"]
