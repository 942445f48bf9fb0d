"""For authors of tasks and engines: the records of the data flow, and the `Task` and `Engine` protocols.

    Task -> Problem -> Prompt -> Engine -> Completion -> reward -> Trajectory

All records are frozen and need no torch, so that files, processes and tests can build them without loading a model.
Per-token fields are numpy arrays of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.int16]

FinishReason = Literal["stop", "length", "abort"]
EXTERNAL_VERSION = -1  # `policy_version` of tokens that were not sampled from a policy of the run
MAX_REWARD = 1e18  # largest |reward|: the square of an advantage must be finite in float32
MIN_BEHAVIOR = -100.0  # smallest log-prob of a sampled token; lower values (-9999.0, -inf) mark a missing one


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a task: the question and the correct answer."""

    id: str
    question: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem with its prompt text and token ids, as the model receives them."""

    problem: Problem
    text: str
    ids: IntArray


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a completion; stored with every trajectory.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` disable truncation. `logprobs` selects the distribution
    that the log-probs describe: "processed" (after temperature, top-k and top-p, as sampled) or "raw" (softmax of the
    model's logits). Both agree at temperature 1 without truncation. `top_logprobs` counts the ids in `TopTokens`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_stop: bool = False  # sample `max_tokens` tokens in any case; for benchmarks only
    logprobs: Literal["processed", "raw"] = "processed"
    top_logprobs: int = 0

    @property
    def truncated(self) -> bool:
        """Whether top-p or top-k excludes part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable ids at each token and their log-probs under the sampler, (tokens, k); missing: -1, -inf."""

    ids: IntArray
    logps: FloatArray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeOutcome:
    """What happened in the environment of a multi-turn response."""

    prompt: Prompt  # of this response, including what `reset` returned
    calls: int = 0
    tool_errors: int = 0  # calls that raised or could not be made
    void: bool = False  # the last turn is neither a call nor an answer
    failure: str | None = None  # why the response is dropped: the environment raised or hung
    reward: float | None = None  # from the environment; None if the rewards of the recipe score the response
    tool_error: str | None = None  # the first error that a call raised, as the model read it


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled response: token ids, their log-probs under the sampler, and the policy version of each token.

    `loss_mask`: in a multi-turn response, True at tokens the policy sampled and False at observation tokens; None if
    all were sampled. Each observation has at least one token; its log-probs and entropies are NaN, its versions are
    `EXTERNAL_VERSION` and its sampling masks are the tokens themselves. `text` is the text of the last turn.
    `outcome` is set once the response is complete.

    `sampling_mask`: under truncated sampling, the vocabulary ids each token was drawn from
    (docs/results/experiments.md). The trainer renormalizes over them so that both policies share one action space.

    `routed_experts` are the experts that a mixture-of-experts model chose (docs/routing.md), (prompt + response - 1,
    layers, k): one entry per token except the last, which is never fed to the model. If the weights changed during the
    response, an entry is from the policy that ran the token first.
    """

    response_ids: IntArray
    logp_behavior: FloatArray
    policy_version: IntArray
    finish_reason: FinishReason
    text: str
    entropy: FloatArray | None = None
    sampling_mask: tuple[IntArray, ...] | None = None
    routed_experts: ExpertArray | None = None
    loss_mask: BoolArray | None = None
    outcome: EpisodeOutcome | None = None
    top: TopTokens | None = None

    @property
    def sampled(self) -> BoolArray:
        """Whether the policy sampled each token, (tokens,)."""
        return np.ones(len(self.response_ids), dtype=np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled: the length of the response without observations."""
        return int(self.sampled.sum())

    @property
    def external(self) -> bool:
        """Whether no token was sampled by a policy of the run, as in a demonstration."""
        return len(self.policy_version) > 0 and bool((self.policy_version == EXTERNAL_VERSION).all())

    @property
    def turn(self) -> IntArray:
        """The turn number of each token, from 0, (tokens,); an observation belongs to the turn before it."""
        sampled = self.sampled
        begins = sampled & ~np.concatenate([[True], sampled[:-1]])
        return begins.cumsum(dtype=np.int64)

    @classmethod
    def empty(cls) -> Completion:
        """Returns an empty prefix: the engine samples the whole response."""
        return cls(
            response_ids=np.empty(0, dtype=np.int64),
            logp_behavior=np.empty(0, dtype=np.float32),
            policy_version=np.empty(0, dtype=np.int64),
            finish_reason="length",
            text="",
        )

    def truncated(self, tokens: int) -> Completion:
        """Returns the first `tokens` tokens as a prefix, without text.

        The token that ended a response is always left out, so that the ending is sampled again. The text of a prefix is
        undefined because it depends on the tokens that follow.
        """
        n = len(self.response_ids)
        experts = self.routed_experts
        k = min(tokens, n - 1 if self.finish_reason == "stop" else n)
        return replace(
            self,
            response_ids=self.response_ids[:k],
            logp_behavior=self.logp_behavior[:k],
            policy_version=self.policy_version[:k],
            finish_reason="length",
            text="",
            entropy=None if self.entropy is None else self.entropy[:k],
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask[:k],
            routed_experts=None if experts is None else experts[: len(experts) - (n - k)],
            loss_mask=None if self.loss_mask is None else self.loss_mask[:k],
            top=None if self.top is None else TopTokens(self.top.ids[:k], self.top.logps[:k]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A response with its rewards and loss mask, as the trainer and the trajectory file use it."""

    prompt: Prompt
    group: int
    completion: Completion
    sampling: SamplingParams
    loss_mask: BoolArray
    reward: float
    rewards: Mapping[str, float]
    off_policy: bool = False  # an external trace (LUFFY) without behavior policy; `logp_behavior` is NaN, never read

    def __len__(self) -> int:
        return len(self.completion.response_ids)


class RewardSpec(NamedTuple):
    """One reward of a run: a built-in name, `module:function`, or a callable `(completion, problem) -> float`.

    By convention the first reward of a list marks a correct answer with 1.0; the others shape the reward.
    """

    name: str | Callable[[str, Problem], float]
    weight: float = 1.0
    timeout: float = 5.0
    options: Mapping[str, Any] = {}


class Task(Protocol):
    """A source of problems. Both splits are finite, indexable and deterministic, and have no problem in common."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Sequence[Problem]: ...

    @property
    def test(self) -> Sequence[Problem]: ...

    def prompt_text(self, problem: Problem, tokenizer: Any) -> str:
        """Returns the text the model continues, with few-shot examples or chat template applied."""
        ...

    def gold(self, problem: Problem) -> str:
        """Returns the correct response including the stop string, for the supervised warm start."""
        ...

    def with_tools(self, stop: tuple[str, ...], schemas: Sequence[Any], instructions: str, description: str) -> Task:
        """Returns the task for multi-turn episodes: with stops of tool calls, and tools or instructions in prompts."""
        ...

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        """The default rewards of the task, used unless the recipe names others."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a response."""
        ...

    @property
    def max_tokens(self) -> int:
        """The largest number of response tokens this task needs."""
        ...

    @property
    def prompt_style(self) -> str:
        """The prompt format as shown to users: "chat", "plain" or "few-shot, 4 examples"."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences shown beside results: choices made by default, and how to change them."""
        ...


class AbortSignal(Protocol):
    """A request to stop soon, such as a `threading.Event`: set from another thread, read between tokens."""

    def is_set(self) -> bool: ...


class TurnResult(NamedTuple):
    """What follows a turn of the model: an observation and the next turn, or the end of the response.

    `ids` are the tokens of the observation, at least one, with `finish_reason` None. Otherwise the response ends, and
    `ids` is empty.
    """

    ids: IntArray
    finish_reason: FinishReason | None

    @classmethod
    def end(cls, reason: FinishReason) -> TurnResult:
        """Returns the end of the response."""
        return cls(np.empty(0, dtype=np.int64), reason)


class TurnHandler(Protocol):
    """Decides what follows each turn of the responses of one request: runs tools, ends responses.

    It serves the `generate` call of the request and the calls that continue its aborted responses. `prompt` and
    `sample` are the indices of a response in the call.
    """

    max_turn_tokens: int

    def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
        """Begins to handle the last turn of `completion`, which ended with a stop. Returns at once.

        Returns the finish reason if the turn itself ends the response, without regard to tools; None if `result` tells
        what follows. A turn that was submitted before is not handled again.
        """
        ...

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        """Returns what follows the turn submitted last, or None if it is not known after `timeout` seconds."""
        ...


class Engine(Protocol):
    """Samples responses and returns their log-probs. Its only state is the weights: all randomness is in `seed`.

    The engines of this package also score given responses: `EmbeddedEngine.prefill_logps`.

    Calls come from one thread at a time. A call during which the engine died raises `EngineDeadError`; after `restart`
    the engine runs again but has no weights, so `update_weights` has to precede `generate`.
    """

    policy_version: int
    decoded_tokens: int  # total tokens run through the model one at a time
    prefilled_tokens: int  # total tokens run through the model in parallel, without padding

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prefixes: Sequence[Sequence[Completion]] | None = None,
        turns: TurnHandler | None = None,
        abort: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """Returns `samples` completions for each prompt, in order. Equal arguments and weights give equal tokens.

        `prefixes[p][s]` holds the first tokens of sample s of prompt p, of any origin. The completion returned is the
        whole response; the tokens of the prefix keep their log-probs and policy versions. An empty prefix gives exactly
        the result of no prefix. A complete response (`finish_reason="stop"`, or `max_tokens` long) is returned as is.

        With `turns`, a stop ends a turn instead of the response: `turns` returns an observation, which is appended, or
        the end of the response. Responses advance independently of each other. `max_tokens` counts all tokens of a
        response; a turn of `turns.max_turn_tokens` tokens without a stop ends it.

        Soon after `abort` is set the call returns: incomplete responses have `finish_reason="abort"` and may have no
        token. They can be passed as `prefixes` of a later call, under the same or other weights.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        """Load named weights (full precision, adapters merged); tokens sampled from now on carry `version`.

        `as_is` skips everything the engine applies to weights on purpose (quantization, noise).
        """
        ...

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Returns the weights in use, named as in `update_weights`. Loading them with `as_is` changes no bit."""
        ...

    def restart(self) -> None:
        """Restart the engine after `EngineDeadError`; does nothing while it is alive.

        Raises `TrimtabError` if it cannot be restarted.
        """
        ...

    def close(self) -> None:
        """Shut down the engine and every process it started. Idempotent."""
        ...
