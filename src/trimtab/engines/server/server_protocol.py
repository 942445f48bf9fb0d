"""The interface of a server protocol: what Trimtab asks of an inference server, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimtab.engines.server.http_client import Connection
from trimtab.errors import TrimtabError
from trimtab.types import FinishReason, Sampling

# What vLLM writes where a log-prob is minus infinity or missing: JSON has no word for either.
PLACEHOLDER = -9999.0


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One response to be sampled. `ids` are the prompt's tokens and those the response already begins with."""

    name: str = field(compare=False)  # unique among all requests of all trainers
    ids: list[int]
    max_tokens: int  # beyond `ids`
    seed: int  # 63 bits
    sampling: Sampling
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens, one log-prob (nats) each; a server that was interrupted finishes with "abort"."""

    ids: list[int]
    logp: list[float]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Model:
    """What a server says it serves; equal for two servers of one model. `context` in tokens, where it says."""

    name: str
    context: int | None


class Wire(Protocol):
    """A server's dialect. `label` names weights: the publisher gives one, a restarted server has another."""

    def model(self, connection: Connection) -> Model: ...

    def label(self, connection: Connection) -> str:
        """The name of the weights in use."""
        ...

    def ask(self, connection: Connection, ask: CompletionRequest, model: Model) -> Answer:
        """Sample one response."""
        ...

    def processed(self, connection: Connection, ids: list[int], model: Model, vocabulary: int) -> bool:
        """Whether log-probs are those of the distribution sampled from, found by sampling a few tokens after `ids`."""
        ...

    def abort(self, connection: Connection) -> None:
        """End all requests the server is working on; each answers with the tokens it has."""
        ...

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        """Take over the weights in `folder`, forget every cached prefix, and go by `label` from now on."""
        ...


def checked(where: str, ids: Sequence[int], logp: Sequence[float | None], finish: FinishReason) -> Answer:
    """An answer that can be trained on.

    Raises:
        TrimtabError: a token without a log-prob, which must never become a made-up number.
    """
    if len(ids) != len(logp):
        raise TrimtabError(
            f"{where} returned {len(ids)} tokens with {len(logp)} log-probs; it must return one for each"
        )
    for index, value in enumerate(logp):
        if value is None or not math.isfinite(value) or value <= PLACEHOLDER:
            raise TrimtabError(
                f"{where} returned no log-prob for token {index} of {len(ids)} (it says {value}): its weights are not "
                "finite, or it hides log-probs"
            )
    return Answer(list(ids), [float(value) for value in logp if value is not None], finish)
