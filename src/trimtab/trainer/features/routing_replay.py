"""Routing replay (docs/routing.md): the trained policy uses the experts that the engine or its proximal pass chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, ForwardPass, PolicyLearner, StepRecord
from trimtab.trainer.models.logprobs import TokenScores
from trimtab.trainer.models.routing import RouterInfo, require_known_experts, router_info, routing_agreement
from trimtab.trainer.packing import MicroBatch, MiniBatch
from trimtab.types import ExpertArray, Trajectory


class RoutingReplay(Feature):
    """Replays routed experts in every pass of the trained policy, and measures how often its routers agree with them.

    A micro-batch has in its extras
        routes: the replayed experts (tokens, layers, chosen), in the order in which `score` runs the tokens, in CPU
            memory. They are the largest tensors of a large model's micro-batch, and on the device only in a forward.
        agreed: if a proximal pass replays the engine's experts, the number of its (token, layer) pairs whose router
            would have chosen the same experts, and the number of all pairs, (2,).
    """

    def __init__(self, replay: str, experts: RouterInfo) -> None:
        self.replay, self.experts = replay, experts
        self._counts: list[torch.Tensor] = []  # of each micro-batch, on the device: nothing waits for it

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        if self.replay == "proximal":
            return micro
        return micro.with_extras(routes=pack_routes(trajectories, micro.tokens.prompt_index.tolist(), self.experts))

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        if call.purpose == "reference" or not call.micro.rows:
            return nullcontext({})
        routes = call.micro.extras.get("routes")
        if call.purpose in ("prepare", "train") and routes is None:
            raise ValueError(f"no experts to replay for the micro-batch of rows {call.micro.rows}")
        to_measure = "agreed" not in call.micro.extras and (call.measured or self.replay == "proximal")
        record = call.purpose == "proximal" or (call.purpose == "train" and to_measure)
        return nullcontext({"routes": routes, "record": record})

    def after_score(self, call: ForwardPass, scores: TokenScores) -> MicroBatch:
        """Attaches the experts of the proximal pass, or their agreement with the engine's; counts agreement in updates.

        The engine's experts are compared once, in the proximal pass or in the first update. The experts of the proximal
        pass are compared in every epoch.
        """
        micro = call.micro
        chosen, replayed = scores.routes, micro.extras.get("routes")
        if call.purpose == "proximal" and chosen is not None:
            if replayed is None:
                return micro.with_extras(routes=chosen.cpu())
            return micro.with_extras(agreed=routing_agreement(chosen, replayed))
        counts = micro.extras.get("agreed") if call.first_epoch else None
        if chosen is not None and replayed is not None:
            counts = routing_agreement(chosen, replayed)
        if counts is not None:
            self._counts.append(counts)
        return micro

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        self._counts = []

    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        agreed, compared = torch.stack(self._counts).sum(0).tolist() if self._counts else (0, 0)
        return {"routing/agreed": agreed, "routing/compared": compared}

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns how often routers would have chosen the replayed experts themselves."""
        agreed, compared = (record.statistics.counts[f"routing/{name}"] for name in ("agreed", "compared"))
        return {"routing/agreement": agreed / compared} if compared else {}


def require_mixture(config: Config, model: Any) -> RouterInfo:
    """Returns the sizes of a model's mixtures; raises `TrimtabError` for a dense model."""
    info = router_info(model)
    if info.layers == 0:
        raise TrimtabError(
            f'routing.replay = "{config.routing.replay}" needs a mixture of experts, and {config.model.path!r} is '
            "a dense model: leave [routing] out"
        )
    return info


def checked_routes(trajectory: Trajectory, routers: RouterInfo) -> ExpertArray:
    """Returns the routed experts of one response, validated against this model."""
    completion, name = trajectory.completion, f"a response to problem {trajectory.prompt.problem.id!r}"
    routes = completion.routed_experts
    if routes is None:
        raise TrimtabError(
            f"{name} comes without the experts of its tokens, which routing.replay needs: use an engine that records "
            "them"
        )
    tokens = len(trajectory.prompt.ids) + len(completion.response_ids) - 1
    if len(routes) != tokens:
        raise TrimtabError(f"{name} records experts of {len(routes)} tokens, {tokens} were run")
    require_known_experts(routes, routers, name)
    return routes


def pack_routes(trajectories: Sequence[Trajectory], prompt_of: Sequence[int], routers: RouterInfo) -> torch.Tensor:
    """Returns the routed experts of a micro-batch (tokens, layers, chosen): of all prompts, then of all responses.

    `prompt_of` has the index of each response's prompt. Samples share one pass over their prompt, which replays the
    experts of the first sample. The last token of a response is not run and has no experts.
    """
    records = [checked_routes(trajectory, routers) for trajectory in trajectories]
    lengths = [len(trajectory.prompt.ids) for trajectory in trajectories]
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompt_of)))}
    prompts = [records[row][: lengths[row]] for _, row in sorted(first.items())]
    responses = [record[length:] for record, length in zip(records, lengths, strict=True)]
    return torch.from_numpy(np.concatenate([*prompts, *responses]))
