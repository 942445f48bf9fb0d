"""Routing replay (METHODS 8.1): checks of recipes, and the engine's routed experts as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trimtab.config import Config
from trimtab.errors import TrimtabError
from trimtab.models.routing import UNROUTED, RouterInfo, Routes, router_info
from trimtab.objectives import Objective
from trimtab.types import ExpertArray, Trajectory

_NO_EXPERTS = {
    "server": "servers return none here",
    "vllm": "vLLM returns them on GPUs only, where they are not read here",
}


def refuse(config: Config, built: Objective) -> None:
    """Raise `TrimtabError` for replay that is impossible or without effect. Needs no model."""
    trainer, engine, replay = config.trainer, config.engine, config.routing.replay
    if replay == "proximal" and "proximal" not in built.needs:
        raise TrimtabError(
            'routing.replay = "proximal" records experts in the proximal pass, and objective '
            f'{built.name!r} has none: use "rollout"'
        )
    if replay == "proximal" and trainer.minibatches * trainer.epochs == 1:
        # The proximal pass of a single update is its own forward, which would replay its own choice.
        raise TrimtabError(
            'routing.replay = "proximal" has no effect with one update per batch, whose proximal policy is the current '
            'one: raise trainer.minibatches or trainer.epochs, or use "rollout"'
        )
    if replay != "rollout":
        return
    if engine.type in _NO_EXPERTS:
        raise TrimtabError(
            f'routing.replay = "rollout" needs an engine that returns experts, and {_NO_EXPERTS[engine.type]}: use '
            'engine.type = "embedded", or replay = "proximal"'
        )
    if config.expert is not None:
        raise TrimtabError(
            'routing.replay = "rollout" needs the experts of every token, and no engine ran the traces of [expert]: '
            'leave one of them out, or use replay = "proximal"'
        )


def experts(config: Config, model: Any) -> RouterInfo | None:
    """Returns the routers of the trained model, or None if nothing is replayed.

    Raises:
        TrimtabError: the model is dense, or a mixture of experts of an unknown architecture.
    """
    if config.routing.replay == "none":
        return None
    info = router_info(model)
    if info.layers == 0:
        raise TrimtabError(
            f'routing.replay = "{config.routing.replay}" needs a mixture of experts, and {config.model.path!r} is a '
            "dense model: leave [routing] out"
        )
    return info


def check(trajectory: Trajectory, routers: RouterInfo) -> ExpertArray:
    """Returns the routed experts of one response, validated against this model.

    Raises:
        TrimtabError: there are none, their shape is wrong, or an index is no expert of this model. The message names
            the response.
    """
    completion, name = trajectory.completion, f"a response to problem {trajectory.prompt.problem.id!r}"
    routes = completion.routes
    if routes is None:
        raise TrimtabError(
            f'{name} comes without the experts of its tokens, which routing.replay = "rollout" needs: use an engine '
            "that records them"
        )
    expected = (len(trajectory.prompt.ids) + len(completion.response_ids) - 1, routers.layers, routers.chosen)
    if routes.shape != expected:
        raise TrimtabError(
            f"{name}: experts are recorded in the shape {routes.shape}, its tokens in this model need {expected}"
        )
    if routes.size and (routes.min() < 0 or routes.max() >= routers.experts):
        raise TrimtabError(
            f"{name}: expert {routes.min() if routes.min() < 0 else routes.max()} is recorded, this model has "
            f"{routers.experts}"
        )
    return routes


def pack(trajectories: Sequence[Trajectory], prompt_of: Sequence[int], time: int, routers: RouterInfo) -> Routes:
    """Routed experts of a micro-batch, padded like its tokens: prompts on the left, responses on the right.

    Args:
        prompt_of: index of the prompt of each response. Samples share one pass over their prompt; the experts of the
            first sample are replayed there.
        time: padded length of the responses. Their last tokens are not run through the model and are `UNROUTED`, like
            padding.

    Raises:
        TrimtabError: see `check`.
    """
    records = [check(trajectory, routers) for trajectory in trajectories]
    prompt_lengths = [len(trajectory.prompt.ids) for trajectory in trajectories]
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompt_of)))}
    shape = (routers.layers, routers.chosen)
    prompts = np.full((len(first), max(prompt_lengths), *shape), UNROUTED, dtype=np.int16)
    responses = np.full((len(records), time, *shape), UNROUTED, dtype=np.int16)
    for prompt, row in first.items():
        prompts[prompt, prompts.shape[1] - prompt_lengths[row] :] = records[row][: prompt_lengths[row]]
    for row, (record, start) in enumerate(zip(records, prompt_lengths, strict=True)):
        responses[row, : len(record) - start] = record[start:]
    return Routes(torch.from_numpy(prompts), torch.from_numpy(responses))
