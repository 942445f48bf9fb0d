"""Runs the episodes of a request: each response has an environment, which is called between the turns of the engine."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from trimtab.errors import TrimtabError, TrimtabWarning, error_text
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.background import BackgroundCall, EnvironmentFailed
from trimtab.trainer.environments.episode import Episode, usable_reward, wait_for
from trimtab.trainer.environments.formats import Call, Format, ResultEncoder, ToolError, escape_surrogates
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, EpisodeOutcome, FinishReason, Problem, Prompt, SamplingParams, TurnResult

T = TypeVar("T")


@dataclass
class EpisodeRunner:
    """Runs episodes. Holds the settings that the episodes of all requests share.

    Attributes:
        factory: creates an environment.
        form: how calls and results are written.
        section: limits of an episode; its timeout also applies to the constructor, `reset`, `get_reward` and `close`.
        tokenizer: encodes results.
        max_tokens: limit of a response, including results.
        encode_prompt: returns the prompt of a problem, encoded by a tokenizer.
        max_prompt: largest number of prompt tokens that fits into the context beside a response; None: not known.
        concurrent_calls: number of calls that run at a time; waiting does not count as time of a call. None: no limit.
    """

    factory: Callable[[], Any]
    form: Format
    section: EnvironmentConfig
    tokenizer: Any
    max_tokens: int
    encode_prompt: Callable[[Problem, Any], Prompt]
    max_prompt: int | None = None
    concurrent_calls: int | None = None

    def __post_init__(self) -> None:
        self.encoder = ResultEncoder(self.tokenizer, self.form, self.section.max_observation_tokens)
        self.slots = None if self.concurrent_calls is None else threading.Semaphore(self.concurrent_calls)

    def generate(
        self,
        generate: Callable[..., list[list[Completion]]],
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        reset_seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """Returns the responses of one call of `generate` (an `Engine.generate`) with the outcomes of their episodes.

        If a response was aborted, no response has an outcome: `get_reward` is not called while tools may be running.
        """
        with contextlib.closing(Episodes(self, prompts, samples, reset_seeds)) as episodes:
            completions = generate(episodes.prompts, episodes.samples, sampling, seed=seed, turns=episodes)
            if any(completion.finish_reason == "abort" for group in completions for completion in group):
                return completions
            return episodes.finish(completions)


class Episodes:
    """The episodes of one request, over all of its `generate` calls; implements `types.TurnHandler`.

    An environment is created and reset for each of the `samples` responses to each prompt. `reset_seeds` has one seed
    for each prompt (see `reset_seed`), which all responses to the prompt share.

    Pass the attributes `prompts` and `samples` to the engine. Responses to a problem share a prompt if `reset` returned
    the same text for all of them; otherwise each response has a separate prompt.
    """

    def __init__(
        self, runner: EpisodeRunner, prompts: Sequence[Prompt], samples: int, reset_seeds: Sequence[int]
    ) -> None:
        self.max_turn_tokens = runner.section.max_turn_tokens or runner.max_tokens
        self._runner = runner
        self._group_size = samples
        self._episodes = [
            Episode(prompt, seed, runner.section.timeout)
            for prompt, seed in zip(prompts, reset_seeds, strict=True)
            for _ in range(samples)
        ]
        try:
            self._construct()
            self._reset()
        except BaseException:
            self.close()
            raise
        groups = _split_batches(self._episodes, samples)
        shared = all(episode.prompt.text == group[0].prompt.text for group in groups for episode in group)
        self.samples = samples if shared else 1
        self.prompts = [episode.prompt for episode in self._episodes[:: self.samples]]

    def _construct(self) -> None:
        """Creates all environments, one after another, because a class may count its objects."""
        calls: list[BackgroundCall] = []
        in_turn = True
        for episode in self._episodes:
            calls.append(episode.start_constructor(self._runner.factory))
            if in_turn:  # if a constructor hangs, the remaining ones run concurrently
                calls[-1].wait(float("inf"))
                in_turn = calls[-1].done()
        for episode, call in zip(self._episodes, calls, strict=True):
            episode.value(call, "the constructor")

    def _reset(self) -> None:
        """Resets all environments concurrently, and appends the texts they return to the questions."""
        begun = [episode for episode in self._episodes if episode.failure is None]
        calls = [episode.start_reset() for episode in begun]
        encoded: dict[tuple[str, str], Prompt] = {}  # responses to a problem usually have the same text
        for episode, call in zip(begun, calls, strict=True):
            text = escape_surrogates(episode.value(call, "reset") or "")
            if text:
                key = episode.prompt.problem.id, text
                encoded[key] = prompt = encoded.get(key) or self._encode_with_text(episode.prompt.problem, text)
                room, n = self._runner.max_prompt, len(prompt.ids)
                if room is None or n <= room:
                    episode.prompt = prompt
                else:
                    episode.failure = (
                        f"what reset returned makes a prompt of {n} tokens, and the context holds {room} besides "
                        f"max_tokens = {self._runner.max_tokens}"
                    )

    def _encode_with_text(self, problem: Problem, text: str) -> Prompt:
        """Returns the prompt of a problem with `text` appended to the question."""
        tokenizer = self._runner.encoder.tokenizer
        prompt = self._runner.encode_prompt(replace(problem, question=problem.question + text), tokenizer)
        if text.strip() not in prompt.text:  # some chat templates strip messages
            raise TrimtabError(
                f"problem {problem.id!r}: what reset() returned is not in the prompt, because the prompts of this task "
                "do not contain the question; let reset() return None"
            )
        return replace(prompt, problem=problem)

    def _find_episode(self, prompt: int, sample: int) -> Episode:
        return self._episodes[prompt * self.samples + sample]

    def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
        episode = self._find_episode(prompt, sample)
        n = len(completion.response_ids)
        if n == episode.length:
            return None  # an aborted call has submitted this turn before
        if not np.array_equal(completion.response_ids[: len(episode.ids)], episode.ids):
            raise TrimtabError(
                f"problem {episode.prompt.problem.id!r}: the engine returned a turn whose response does not begin with "
                "the tokens of the turns and results before it: it must append to them, and never encode a text again"
            )
        episode.ids = completion.response_ids
        episode.length, episode.result, episode.call = n, None, None
        turn = int(completion.turn[-1])
        call = self._parse_call(episode, completion)
        if call is None or turn + 1 >= self._runner.section.max_turns or episode.failure:
            episode.result = TurnResult.end("stop" if call is None else "length")
            return episode.result.finish_reason
        episode.calls += 1
        if isinstance(call, ToolError):
            episode.result = self._observe_error(episode, call)
            return None
        episode.call = episode.start_tool(call, self._runner.slots)
        return None

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        episode = self._find_episode(prompt, sample)
        if episode.result is None:
            assert episode.call is not None
            if not episode.call.wait(timeout):
                return None
            episode.result = self._observe(episode, episode.call)
        episode.ids = np.concatenate([episode.ids[: episode.length], episode.result.ids])
        return episode.result

    def finish(self, completions: Sequence[Sequence[Completion]]) -> list[list[Completion]]:
        """Calls `get_reward` of the environments and returns the completed responses with their outcomes."""
        unfailed = [episode for episode in self._episodes if episode.failure is None]
        pending = [(episode, episode.start_optional("get_reward", usable_reward)) for episode in unfailed]
        for episode, call in pending:
            if call is not None:
                episode.reward = episode.value(call, "get_reward")
        responses = []
        for episode, completion in zip(self._episodes, chain.from_iterable(completions), strict=True):
            outcome = EpisodeOutcome(
                prompt=episode.prompt,
                calls=episode.calls,
                tool_errors=episode.tool_errors,
                void=self._is_void(episode, completion),
                failure=episode.failure,
                reward=episode.reward if episode.failure is None else None,
                tool_error=episode.tool_error,
            )
            responses.append(replace(completion, outcome=outcome))
        return _split_batches(responses, self._group_size)

    def close(self) -> None:
        """Closes the environments that have a method `close`, because the next request may need their resources.

        Cancels calls that have not started, and waits for calls in progress.
        """
        running = [episode.thread for episode in self._episodes if not episode.thread.cancel()]
        for thread in running:  # after all cancellations: otherwise a call that waits for a slot could start
            thread.wait()
        closing = [call for episode in self._episodes if (call := episode.start_optional("close")) is not None]
        for call in closing:
            _, failure = wait_for(call)
            if failure is not None:  # only a warning: the responses are complete, but resources may leak
                warnings.warn(f"close() of an environment {failure}", TrimtabWarning, stacklevel=2)
        for episode in self._episodes:
            episode.thread.end()

    def _parse_call(self, episode: Episode, completion: Completion) -> Call | ToolError | None:
        """Returns the call at the end of the last turn, an error if it cannot be parsed, or None if there is none."""
        try:
            return self._runner.form.parse(self._last_turn(completion))
        except ToolError as error:
            return error
        except Exception as error:
            episode.failure = f"parse() of the format raised {error_text(error)}"
            return None

    def _last_turn(self, completion: Completion) -> str:
        """Returns the text of the last turn, with its special tokens."""
        last = (completion.turn == completion.turn[-1]) & completion.sampled
        return self._runner.encoder.decode(completion.response_ids[last].tolist())

    def _is_void(self, episode: Episode, completion: Completion) -> bool:
        if len(completion.response_ids) == 0 or self._parse_call(episode, completion) is not None:
            return False
        text, turn = completion.text, self._last_turn(completion)
        begins = [turn.find(begin) for begin in getattr(self._runner.form, "begin", ()) if begin in turn]
        if begins:
            text = turn[: min(begins)]  # an unfinished call is not an answer
        answer = self._runner.section.answer
        if answer is None:
            return not text.strip()
        return re.search(answer, text) is None

    def _observe(self, episode: Episode, call: BackgroundCall) -> TurnResult:
        """Returns what follows a call that has ended or timed out."""
        try:
            text = call.value()
        except EnvironmentFailed as error:
            episode.failure = f"a tool {error}"
            return TurnResult.end("stop")
        except Exception as error:
            return self._observe_error(episode, error)
        return self._make_observation(episode, text)

    def _observe_error(self, episode: Episode, error: Exception) -> TurnResult:
        episode.tool_errors += 1
        text = f"{error if isinstance(error, ToolError) else error_text(error)}"
        episode.tool_error = episode.tool_error or text
        return self._make_observation(episode, f"Error: {text}")

    def _make_observation(self, episode: Episode, text: str) -> TurnResult:
        """Returns a result as an observation, or ends the response if the result does not fit into it."""
        text = self._runner.encoder.shortened(escape_surrogates(text))
        try:
            ids = self._runner.encoder.observation(text)
        except TrimtabError:
            raise
        except Exception as error:
            episode.failure = f"render() of the format raised {error_text(error)}"
            return TurnResult.end("stop")
        if len(ids) == 0:
            raise TrimtabError("the format renders a result as no token: let render() add something to an empty result")
        if episode.length + len(ids) >= self._runner.max_tokens:
            return TurnResult.end("length")
        return TurnResult(ids, None)


def reset_seed(seed: int, number: int) -> int:
    """Returns the seed of `reset` for all responses to a prompt, from a seed and the prompt's number in the run."""
    return derive(seed, "environment", number) % 2**31


def _split_batches(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
