"""The records of the data flow: tasks, prompts, completions, trajectories, and the `Engine` protocol.

    Task -> Prompt -> Engine -> Completion -> Trajectory -> reward -> Group -> advantages -> Batch -> Objective

Everything here is frozen and free of torch: a record that was handed on can no longer be changed, and files,
processes and tests can build one without loading a model. Per-token fields are numpy arrays of equal length.
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

EXTERNAL_VERSION = -1
"""`policy_version` of tokens that no policy of the run wrote."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a task: what is asked and what the right answer is."""

    id: str
    question: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem as the model sees it, token for token."""

    problem: Problem
    text: str
    ids: IntArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """The contract a token was drawn under; stored with every trajectory.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` mean "not truncated". `logprobs` says which
    distribution the log-probs describe: "processed" is the one really sampled (after temperature, top-k, top-p),
    "raw" the model's own softmax. Both agree at temperature 1 without truncation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_stop: bool = False  # forced length: benchmarks only
    logprobs: Literal["processed", "raw"] = "processed"

    @property
    def truncated(self) -> bool:
        """Whether part of the vocabulary could not be sampled."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine returns for one sample: token ids, what it thought of them, and which weights wrote them.

    `kept` holds, under truncated sampling, the vocabulary ids each token was drawn from (METHODS 3.4, "keep
    sampling mask"); the trainer renormalises over them so that both policies share one action space.

    `routes` holds the experts that a mixture-of-experts model sent each token to, (prompt + response - 1, layers, k):
    one entry for each token that was run, which the last one never is (METHODS 8.1). Where weights changed in between,
    an entry is of the policy that ran its token first.
    """

    response_ids: IntArray
    logp_behavior: FloatArray
    policy_version: IntArray
    finish: FinishReason
    text: str
    entropy: FloatArray | None = None
    kept: tuple[IntArray, ...] | None = None
    routes: ExpertArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One scored response, ready for the trainer and for the trajectory file."""

    prompt: Prompt
    group: int
    completion: Completion
    sampling: Sampling
    loss_mask: BoolArray
    reward: float
    rewards: Mapping[str, float]
    off_policy: bool = False  # an external trace (LUFFY): no behavior policy, `logp_behavior` is NaN and never read

    def __len__(self) -> int:
        return len(self.completion.response_ids)


class RewardSpec(NamedTuple):
    """One reward of a run: a built-in name, `module:function`, or a callable `(completion, problem) -> float`.

    The first reward of a list is the one that says "correct" (1.0) by convention; the others shape.
    """

    name: str | Callable[[str, Problem], float]
    weight: float = 1.0
    timeout: float = 5.0
    options: Mapping[str, Any] = {}


class Task(Protocol):
    """Where prompts come from. Both splits are finite, indexable and deterministic; they share no problem."""

    name: str

    @property
    def train(self) -> Sequence[Problem]: ...

    @property
    def test(self) -> Sequence[Problem]: ...

    def prompt_text(self, problem: Problem, tokenizer: Any) -> str:
        """The exact text the model continues (few-shot examples or chat template applied)."""
        ...

    def gold(self, problem: Problem) -> str:
        """The text a perfect model writes after the prompt, stop string included (supervised warm start)."""
        ...

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        """What this task pays for unless the recipe says otherwise."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a response."""
        ...

    @property
    def max_tokens(self) -> int:
        """How many response tokens this task needs at most."""
        ...

    @property
    def prompt_style(self) -> str:
        """How its prompts are made, for people: "chat", "plain" or "few-shot, 4 examples"."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was chosen in the user's place, and how to choose otherwise: sentences shown beside results."""
        ...


class AbortSignal(Protocol):
    """A request to stop soon, as `threading.Event` is one: set from another thread, looked at between tokens."""

    def is_set(self) -> bool: ...


class Engine(Protocol):
    """Samples responses and says with which probability. Stateless but for its weights: all randomness is in `seed`.

    Calls come from one thread at a time. A call that the engine did not survive raises `EngineDeadError`; after
    `recover` the engine works again, without weights: publish before generating.
    """

    policy_version: int
    decoded: int  # tokens run through the model one at a time, since the start
    prefilled: int  # tokens run through the model in parallel, since the start; padding is not counted

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        prefixes: Sequence[Sequence[Completion]] | None = None,
        interrupt: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """`samples` completions for each prompt, in order. Equal arguments and weights give equal tokens.

        `prefixes[p][s]` holds the first tokens of sample s of prompt p, of any origin; the completion returned is
        the whole response, and its log-probs and versions say token by token who wrote what. An empty prefix gives
        exactly what no prefix gives; a complete response (`finish="stop"`, or `max_tokens` long) comes back as it is.

        Soon after `interrupt` is set the call returns what there is: responses that are not complete have
        `finish="abort"` (and possibly no token). All of it may be given back as `prefixes`, to go on under other
        weights.
        """
        ...

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """Take over named weights (full precision, adapters merged); tokens sampled from now on carry `version`.

        `exact` leaves out whatever the engine does to weights on purpose (quantization, noise).
        """
        ...

    def weights(self) -> Iterable[tuple[str, Any]]:
        """The weights in use, by the names `publish` takes; publishing them `exact` changes no bit."""
        ...

    def recover(self) -> None:
        """Bring the engine back after `EngineDeadError`; nothing to do where it is alive. Raises `TrimtabError` for
        good."""
        ...

    def close(self) -> None:
        """End the engine and every process it started. Idempotent."""
        ...


# A prefix of no tokens: the response is sampled whole.
EMPTY = Completion(
    response_ids=np.empty(0, dtype=np.int64),
    logp_behavior=np.empty(0, dtype=np.float32),
    policy_version=np.empty(0, dtype=np.int64),
    finish="length",
    text="",
)


def cut(completion: Completion, kept: int) -> Completion:
    """The first `kept` tokens, but never the one that ended the response: its ending is sampled again.

    The prefix has no text: what its ids spell depends on what follows them.
    """
    n = len(completion.response_ids)
    k = min(kept, n - 1 if completion.finish == "stop" else n)
    return replace(
        completion,
        response_ids=completion.response_ids[:k],
        logp_behavior=completion.logp_behavior[:k],
        policy_version=completion.policy_version[:k],
        finish="length",
        text="",
        entropy=None if completion.entropy is None else completion.entropy[:k],
        kept=None if completion.kept is None else completion.kept[:k],
        routes=None if completion.routes is None else completion.routes[: len(completion.routes) - (n - k)],
    )


def splice(prefix: Completion, whole: Completion) -> Completion:
    """`whole` with its first tokens replaced by those of `prefix`. What one of the two lacks, the result lacks."""
    k = len(prefix.response_ids)
    if k == 0:
        return whole
    old, new, old_kept, new_kept = prefix.entropy, whole.entropy, prefix.kept, whole.kept
    routes, before = whole.routes, prefix.routes
    return replace(
        whole,
        response_ids=np.concatenate([prefix.response_ids, whole.response_ids[k:]]),
        logp_behavior=np.concatenate([prefix.logp_behavior, whole.logp_behavior[k:]]),
        policy_version=np.concatenate([prefix.policy_version, whole.policy_version[k:]]),
        entropy=None if old is None or new is None else np.concatenate([old, new[k:]]),
        kept=None if old_kept is None or new_kept is None else old_kept + new_kept[k:],
        routes=None if routes is None or before is None else np.concatenate([before, routes[len(before) :]]),
    )
