"""The interface of a server protocol: requests and results that every inference server supports."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from trimtab.trainer.engines.server.http_client import Connection, WrongAnswer
from trimtab.types import FinishReason, SamplingParams

# vLLM's substitute for a log-prob that is minus infinity or missing, which JSON cannot express.
PLACEHOLDER = -9999.0
# Largest log-prob that is accepted. A logit minus the log of the summed exponentials can be above 0 by the rounding of
# float32: by 5e-4 for logits up to 8192.
MAX_LOGP = 1e-3
# The log-probs of so many sampled tokens are never all 0: in float32, each of them would need a logit 17 nats above all
# others together. Below temperature 1 more tokens are needed: 17 nats are then a smaller gap of the model's own logits.
# Nor do they all agree to within RESOLUTION (float32 cannot tell smaller log-probs from 0), unless all ids are equally
# probable: then they lie within UNIFORM nats of -log(vocabulary).
MIN_CERTAIN_TOKENS = 8
RESOLUTION, UNIFORM = 2.0**-25, 0.1
# A token this many nats below the uniform distribution is sampled once in 10^21 tokens.
IMPROBABLE = 50.0

# Set explicitly, because a server would otherwise take them from the model's generation config or its own defaults.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}

# Messages quote names, so control characters and line separators are not allowed.
Name = Annotated[str, Field(max_length=1000, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]
TokenId = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(gt=PLACEHOLDER, le=MAX_LOGP)]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one response or turn.

    If `scored` > 0, nothing is sampled: the result has the last `scored` tokens of `ids` with their log-probs at
    temperature 1, as the server computes them for a prompt. `max_tokens` then equals `scored`.
    """

    ids: tuple[int, ...]  # of the prompt and of the response so far
    max_tokens: int  # largest number of new tokens
    seed: int  # 63 bits
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    scored: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The sampling parameters that all servers take by the same names."""
        return {
            **NEUTRAL_SAMPLING,
            "temperature": self.sampling.temperature,
            "stop": [] if self.sampling.ignore_stop else list(self.sampling.stop),
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": self.sampling.ignore_stop,
        }


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """New tokens, each with a log-prob in nats; `finish` is "abort" if the server was told to abort."""

    ids: list[int]
    logp: list[float]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Model:
    """The model a server reports; equal for two servers of one model. `context` in tokens, None if not reported."""

    name: str
    context: int | None


class ServerProtocol(Protocol):
    """The HTTP routes of one kind of server.

    A label names weights: each update sets a new label, and a restarted server reports another one. A request with
    `probe` as its sampling parameters shows whether log-probs are those of the sampled distribution.
    """

    probe: SamplingParams

    async def model(self, connection: Connection) -> Model: ...

    async def label(self, connection: Connection) -> str:
        """Returns the label of the weights in use."""
        ...

    async def request(self, connection: Connection, request: CompletionRequest, model: Model) -> CompletionResult:
        """Returns one sampled response, or the scores of a given one."""
        ...

    def is_processed(self, logp: Sequence[float], vocabulary: int) -> bool:
        """Returns whether the log-probs of a request with `probe` are those of the sampled distribution."""
        ...

    async def abort(self, connection: Connection) -> None:
        """Aborts all requests of the server; each returns the tokens sampled so far."""
        ...

    async def load(self, connection: Connection, folder: Path, label: str) -> None:
        """Loads the weights in `folder`, resets the prefix cache and sets `label`."""
        ...


def scored_result(
    connection: Connection, request: CompletionRequest, prompt: Sequence[Mapping[int, float]]
) -> CompletionResult:
    """Returns the log-probs of the last `scored` tokens of a request; raises `WrongAnswer` if one is missing.

    prompt: log-probs by id, for each of the last tokens of the request.
    """
    ids, entries = request.ids[-request.scored :], prompt[-request.scored :]
    if len(entries) < len(ids) or any(id_ not in entry for id_, entry in zip(ids, entries, strict=True)):
        raise WrongAnswer(f"{connection.url} returned no log-prob for a token of the prompt, which was asked for")
    return CompletionResult(list(ids), [entry[id_] for id_, entry in zip(ids, entries, strict=True)], "length")


def check_result(where: str, result: CompletionResult, request: CompletionRequest, vocabulary: int) -> None:
    """Raises `WrongAnswer` for a result that a server cannot have sampled."""
    tokens = len(result.ids)
    if tokens != len(result.logp):
        wrong = f"{tokens} tokens with {len(result.logp)} log-probs; it must return one for each"
    elif tokens > request.max_tokens:
        wrong = f"{tokens} tokens, asked for {request.max_tokens}"
    elif not tokens and result.finish != "abort":
        wrong = "a response without tokens"
    elif max(result.ids, default=0) >= vocabulary:
        wrong = f"token {reprlib.repr(max(result.ids))}, beyond the vocabulary of {vocabulary}"
    elif tokens and (impossible := _impossible(result.logp, request, math.log(vocabulary))):
        wrong = impossible
    else:
        return
    raise WrongAnswer(f"{where} returned {wrong}")


def _impossible(logp: Sequence[float], request: CompletionRequest, uniform: float) -> str | None:
    """Returns what is wrong if sampled tokens cannot have these log-probs, or None. uniform: log(vocabulary).

    Above temperature 1, only log-probs that are all 0 count: the probe finds log-probs from before the temperature.
    """
    sampling, first, lowest = request.sampling, logp[0], min(logp)
    hot = sampling.temperature > 1.0
    if lowest < -IMPROBABLE - uniform and not request.scored and not hot:
        return f"log-prob {lowest:g} for a token that it sampled, which no such token has"
    same = max(logp) - lowest < RESOLUTION and (not hot or abs(first) < RESOLUTION) and abs(first + uniform) > UNIFORM
    many = len(logp) * min(sampling.temperature, 1.0) >= MIN_CERTAIN_TOKENS
    if same and many and not sampling.truncated:  # truncation may have left one token to sample
        return f"log-prob {first:g} for all {len(logp)} tokens, sampled at temperature {sampling.temperature:g}"
    return None
