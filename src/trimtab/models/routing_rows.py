"""Routed experts arranged as a micro-batch, and the position of each token when the model runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Int16
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.models.routing import FREE, Tape, recorded, replayed


class Routes(NamedTuple):
    """The experts of a micro-batch's tokens, `FREE` where nothing is known; what padding holds does not matter.

    A response's last token is not run through the model: its entry is never read, and `FREE` where it was recorded.
    """

    prompts: Int16[Tensor, "prompts prompt_time layers chosen"]
    responses: Int16[Tensor, "batch time layers chosen"]


def agreement(one: Routes, other: Routes) -> tuple[int, int]:
    """Of the (token, layer) pairs known to both: how many went to the same set of experts, and how many there are."""
    same = known = 0
    for a, b in zip(one, other, strict=True):
        both = ((a != FREE) & (b != FREE)).all(-1)
        same += int(((a.sort(-1).values == b.sort(-1).values).all(-1) & both).sum())
        known += int(both.sum())
    return same, known


@dataclass(frozen=True, eq=False)
class Places:
    """The order in which a forward runs the tokens of a micro-batch.

    `packed`: real tokens of all prompts, then of all responses; else rows of prompt and response, padding and all,
    without the last column. `run` are the response tokens that are run: every one but each row's last.
    """

    prompt_mask: Bool[Tensor, "prompts prompt_time"]
    run: Bool[Tensor, "batch time"]
    prompt_index: Int[Tensor, " batch"]
    packed: bool

    @contextmanager
    def routed(self, model: Any, routes: Routes | None, record: bool) -> Iterator[Tape | None]:
        """One forward inside: with these routes, recording what its routers choose, or both."""
        with ExitStack() as stack:
            if routes is not None:
                stack.enter_context(replayed(model, self.flat(routes)))
            yield stack.enter_context(recorded(model)) if record else None

    def flat(self, routes: Routes) -> Int16[Tensor, "tokens layers chosen"]:
        """In the order of the forward; padding goes where its router sends it.

        Raises `TrimtabError` when the routes have another shape than the tokens.
        """
        shapes = tuple(self.prompt_mask.shape), tuple(self.run.shape)
        if (found := (tuple(routes.prompts.shape[:-2]), tuple(routes.responses.shape[:-2]))) != shapes:
            raise TrimtabError(f"routes of {found[0]} prompt and {found[1]} response tokens for tokens of {shapes}")
        prompts, responses = (part.to(self.run.device) for part in routes)
        if self.packed:
            return torch.cat([prompts[self.prompt_mask], responses[self.run]])
        prompts = prompts.masked_fill(~self.prompt_mask[..., None, None], FREE)
        responses = responses.masked_fill(~self.run[..., None, None], FREE)
        return torch.cat([prompts[self.prompt_index], responses], dim=1)[:, :-1].flatten(0, 1)

    def spread(self, flat: Int16[Tensor, "tokens layers chosen"]) -> Routes:
        """Back from the order of the forward. A prompt of several rows shows what its first row recorded."""
        sizes = flat.shape[-2:]
        prompts = flat.new_full((*self.prompt_mask.shape, *sizes), FREE)
        responses = flat.new_full((*self.run.shape, *sizes), FREE)
        if self.packed:
            count = int(self.prompt_mask.sum())
            prompts[self.prompt_mask], responses[self.run] = flat[:count], flat[count:]
            return Routes(prompts, responses)
        rows = flat.view(len(self.run), -1, *sizes)
        width = prompts.shape[1]
        responses[:, :-1] = rows[:, width:]
        first = {prompt: row for row, prompt in reversed(list(enumerate(self.prompt_index.tolist())))}
        prompts[list(first)] = rows[list(first.values()), :width]
        return Routes(
            prompts.masked_fill_(~self.prompt_mask[..., None, None], FREE),
            responses.masked_fill_(~self.run[..., None, None], FREE),
        )
