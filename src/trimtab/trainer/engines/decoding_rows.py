"""One generate call of any engine, and its responses during decoding."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab.trainer.engines.request import EngineModel, Prefixes, validate_prefixes, validate_request, validate_tokens
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.types import (
    EXTERNAL_VERSION,
    Completion,
    FinishReason,
    Prompt,
    SamplingParams,
    TopTokens,
    TurnHandler,
    TurnResult,
)

TopRow = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(slots=True, eq=False)
class DecodingRow:
    """One response during decoding. Its lists with one item per token begin with the tokens of `prefix`."""

    prompt: int  # index in the call
    sample: int  # index among the responses to the prompt
    uniform_draws: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # one for each token
    prefix: Completion | None = None
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)  # shorter than `ids` if the engine or `prefix` has no entropies
    kept: list[NDArray[np.int64]] = field(default_factory=list)  # sampling mask of each token; empty if not truncated
    top: list[TopRow] = field(default_factory=list)  # ids and log-probs of the most probable ids of each token
    # Routed experts of prompt and response, if recorded: parts (tokens, layers, k), filled from the first step on.
    routes: list[NDArray[np.int16]] = field(default_factory=list)
    finish: FinishReason = "length"
    complete: bool = False  # nothing is left to sample
    sampled: list[bool] = field(default_factory=list)  # False for the tokens of observations
    turn_start: int = 0  # length of the response before its last turn
    observation: deque[int] = field(default_factory=deque)  # its tokens that are not appended yet
    waiting: bool = False  # for the result of the last turn
    due: int = 0  # the decoding step at which that result is applied

    def begin(self, prefix: Completion, max_tokens: int, *, multi_turn: bool) -> None:
        """Begins with a prefix, which may be empty."""
        if len(prefix.response_ids) == 0:
            return
        self.prefix, whole = prefix, len(prefix.response_ids) == max_tokens
        # An aborted call also returns responses that had already ended.
        self.complete = prefix.finish_reason != "abort" if multi_turn else prefix.finish_reason == "stop" or whole
        self.finish = "stop" if self.complete and prefix.finish_reason == "stop" else "length"
        self.ids, self.logp = prefix.response_ids.tolist(), prefix.logp_behavior.tolist()
        self.entropy = [] if prefix.entropy is None else prefix.entropy.tolist()
        self.kept = list(prefix.sampling_mask or ())
        self.top = [] if prefix.top is None else list(zip(prefix.top.ids, prefix.top.logps, strict=True))
        self.sampled = prefix.sampled.tolist()
        observed = np.flatnonzero(~prefix.sampled)
        self.turn_start = int(observed[-1]) + 1 if len(observed) else 0

    @property
    def prefix_length(self) -> int:
        return 0 if self.prefix is None else len(self.prefix.response_ids)

    @property
    def active(self) -> bool:
        return not self.complete and not self.waiting

    @property
    def turn_ids(self) -> list[int]:
        return self.ids[self.turn_start :] if self.turn_start else self.ids

    def completion(self, version: int, stop: StopChecker) -> Completion:
        """Returns the whole response. Tokens sampled after the prefix have the policy version `version`."""
        old = () if self.prefix is None else self.prefix.policy_version
        sampled = np.array(self.sampled, dtype=np.bool_)
        new = np.where(sampled[self.prefix_length :], version, EXTERNAL_VERSION)
        routes = np.concatenate(self.routes) if self.routes else None
        if self.prefix is not None and len(new) == 0:
            routes = self.prefix.routed_experts
        return Completion(
            response_ids=np.array(self.ids, dtype=np.int64),
            logp_behavior=np.array(self.logp, dtype=np.float32),
            policy_version=np.concatenate([np.asarray(old, dtype=np.int64), new]),
            finish_reason=self.finish,
            text=stop.text(self.turn_ids),
            entropy=np.array(self.entropy, dtype=np.float32) if len(self.entropy) == len(self.ids) else None,
            sampling_mask=tuple(self.kept) if self.kept else None,
            routed_experts=routes,
            loss_mask=None if sampled.all() else sampled,
            top=TopTokens(*(np.stack(values) for values in zip(*self.top, strict=True))) if self.top else None,
        )

    def append(
        self, token: int, logp: float, entropy: float | None, kept: NDArray[np.int64] | None, top: TopRow | None = None
    ) -> None:
        """Appends a sampled token. If an observation is being appended, appends its next token instead."""
        observed = bool(self.observation)
        if observed:
            token, logp, entropy = self.observation.popleft(), math.nan, None if entropy is None else math.nan
            kept = None if kept is None else np.array([token])
            top = None if top is None else (np.full_like(top[0], -1), np.full_like(top[1], -np.inf))
        self.ids.append(token)
        self.logp.append(logp)
        if entropy is not None:
            self.entropy.append(entropy)
        self.sampled.append(not observed)
        if kept is not None:
            self.kept.append(kept)
        if top is not None:
            self.top.append(top)
        if observed:
            self.turn_start = len(self.ids)

    def append_observation(self, *, truncated: bool) -> None:
        """Appends the whole observation. `truncated`: whether tokens have sampling masks."""
        entropy, top = math.nan if self.entropy else None, self.top[-1] if self.top else None
        while self.observation:
            self.append(0, math.nan, entropy, np.empty(0, np.int64) if truncated else None, top)

    def drop_partial_observation(self) -> None:
        """Removes an observation that was appended only in part; a later call handles its turn again."""
        if not self.observation:
            return
        while not self.sampled[-1]:
            for values in (self.ids, self.logp, self.entropy, self.kept, self.top, self.sampled, self.routes):
                if values:
                    values.pop()
        self.observation.clear()

    def end_turn(self, result: TurnResult, max_tokens: int) -> None:
        """Applies the result of the last turn: the response is complete, or has an observation to append.

        Raises `ValueError` if the observation is empty, or leaves no room for a sampled token within `max_tokens`.
        """
        self.waiting = False
        if result.finish_reason is not None:
            self.finish, self.complete = result.finish_reason, True
            return
        if not 0 < len(result.ids) < max_tokens - len(self.ids):
            raise ValueError(f"an observation of {len(result.ids)} tokens after {len(self.ids)} of {max_tokens}")
        self.observation.extend(result.ids.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class GenerateCall:
    """The arguments of one `Engine.generate` call, which were validated, and the rows of its responses."""

    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    seed: int
    turns: TurnHandler | None  # decides what follows a turn; if it is None, a stop ends the response
    version: int  # policy version of the weights
    stop: StopChecker
    rows: list[DecodingRow]  # prompt by prompt

    @classmethod
    def begin(
        cls,
        model: EngineModel,
        version: int,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        seed: int,
        prefixes: Prefixes | None,
        turns: TurnHandler | None,
    ) -> GenerateCall:
        """Validates the arguments; the rows begin with the prefixes."""
        validate_request(model, prompts, samples, sampling, seed)
        stop, multi_turn = StopChecker(model.tokenizer, model.eos_ids, sampling), turns is not None
        validate_prefixes(prefixes, prompts, samples, sampling)
        validate_tokens(prefixes, prompts, stop, model.vocabulary, multi_turn=multi_turn)
        rows = [DecodingRow(p, s) for p in range(len(prompts)) for s in range(samples)]
        if prefixes is not None:
            for row in rows:
                row.begin(prefixes[row.prompt][row.sample], sampling.max_tokens, multi_turn=multi_turn)
        return cls(prompts, samples, sampling, seed, turns, version, stop, rows)

    def ids(self, row: DecodingRow) -> list[int]:
        """Returns the ids of the prompt and of the response so far."""
        return [*self.prompts[row.prompt].ids.tolist(), *row.ids]

    def room(self, row: DecodingRow) -> int:
        """Returns how many more tokens fit into both the response and its last turn."""
        room = self.sampling.max_tokens - len(row.ids)
        limit = None if self.turns is None else self.turns.max_turn_tokens
        return room if limit is None else min(room, limit - (len(row.ids) - row.turn_start))

    def has_ended_turn(self, row: DecodingRow) -> bool:
        """Returns whether a turn of the response had ended when an earlier call was aborted."""
        if self.turns is None or row.complete or not row.turn_ids:
            return False
        return self.stop.ended([row.turn_ids])[0]

    def submit_turn(self, row: DecodingRow) -> None:
        """Ends the turn at a stop: submits it to the handler, or completes the response if there is no handler."""
        finish: FinishReason | None = "stop"
        if self.turns is not None:
            finish = self.turns.submit(row.prompt, row.sample, row.completion(self.version, self.stop))
        if finish is None:
            row.waiting = True
        else:
            row.finish, row.complete = finish, True

    def completions(self) -> list[list[Completion]]:
        """Returns the responses to each prompt. Incomplete rows were aborted; they keep their tokens so far."""
        for row in self.rows:
            if not row.complete:
                row.finish = "abort"
                row.drop_partial_observation()
        done = [row.completion(self.version, self.stop) for row in self.rows]
        return [done[start : start + self.samples] for start in range(0, len(done), self.samples)]
