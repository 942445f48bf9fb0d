"""Log-probs of given responses under the trainer: through Trimtab's packed pass, or a plain padded batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.types import Completion, IntArray, Prompt

MAX_LOGITS = 1 << 27
"""Logits of one forward: half a GiB in float32."""


class Scores(NamedTuple):
    """Log-probs (batch, time) of the responses, and of further ids (batch, time, k) where they were asked for."""

    logp: Tensor
    further: Tensor | None


Forward = Callable[[Any, TokenBatch, float, Tensor | None, Tensor | None], Scores]
"""Takes a model, a batch, the temperature, the ids that each token was drawn from, and further ids to score."""


def packed_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores without padding, as Trimtab trains."""
    scores = score(model, batch, temperature=temperature, kept=kept, head=further)
    return Scores(scores.logp, scores.head)


def padded_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores a padded batch with the model's own forward, as most frameworks do."""
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.response_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.response_mask], 1)
    output = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=batch.response_ids.shape[1] + 1,
    )
    scores = output.logits[:, :-1].float() / temperature
    if kept is not None:
        drawn_from = torch.where(kept < 0, kept[..., :1], kept).clamp(min=0)
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, drawn_from, True)
        scores = scores.masked_fill(~allowed, -torch.inf)
    logps = scores.log_softmax(-1)
    others = None
    if further is not None:
        others = logps.gather(-1, further.clamp(min=0)).masked_fill(further < 0, -torch.inf)
    return Scores(logps.gather(-1, batch.response_ids[..., None])[..., 0], others)


FORWARDS: dict[str, Forward] = {"trimtab": packed_forward, "transformers": padded_forward}
ATTENTION = "sdpa"
"""transformers' attention for `padded_forward`."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """The trained model. precision: the autocast context of its forward. pad_id: any id of the vocabulary."""

    model: Any
    forward: Forward
    pad_id: int
    vocabulary: int
    precision: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float,
        *,
        kept: bool = False,
        further: Sequence[IntArray] | None = None,
    ) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Returns the log-probs (tokens,) of each response, and those (tokens, k) of further ids at its tokens.

        kept: whether the distribution is restricted to the ids that the sampler drew each token from.
        """
        rows = []
        longest = max(len(one.response_ids) for one in completions)
        size = max(1, MAX_LOGITS // (self.vocabulary * longest))
        for start in range(0, len(completions), size):
            part = slice(start, start + size)
            ids = None if further is None else pack_kept([list(row) for row in further[part]], longest)
            logp, others = self.logps(prompts[part], completions[part], temperature, kept=kept, further=ids)
            for row, one in enumerate(completions[part]):
                tokens = len(one.response_ids)
                values = None if others is None else others[row, :tokens].float().cpu().numpy()
                rows.append((logp[row, :tokens].float().cpu().numpy(), values))
        return rows

    def logps(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float,
        *,
        kept: bool = False,
        further: Tensor | None = None,
    ) -> Scores:
        """Scores one micro-batch, with gradient where it is enabled; padded."""
        batch = TokenBatch.pack(
            [prompt.ids for prompt in prompts],
            [one.response_ids for one in completions],
            range(len(prompts)),
            pad_id=self.pad_id,
        )
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        time = batch.response_ids.shape[1]
        sets = pack_kept([one.sampling_mask or () for one in completions], time).to(device) if kept else None
        others = None if further is None else further[:, :time].to(device)
        with self.precision():
            return self.forward(self.model, batch, temperature, sets, others)
