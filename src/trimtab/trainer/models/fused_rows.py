"""Attention of long responses through PyTorch's fused kernel, which stores no scores.

Each response is a row of its prompt's tokens and its own, in which attention is causal; padding on the right is behind
all real tokens. A prompt's queries are computed again in each row, so the rows are used where responses are longer than
their prompts. Below `MIN_WIDTH` tokens the products of `packed_attention.py` are as fast or faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.trainer.models.matmul import product_dtype

# Forward and backward on a CPU take as long as small products at 512 tokens, and 1 / 1.3 of their time at 768.
MIN_WIDTH = 768


class FusedRows(NamedTuple):
    """Where the tokens of a packed row are in rows of a prompt and a response each.

    tokens: the packed token at each place; 0 at padding.
    places: where each packed token is in the flattened rows; those of a prompt are in the first of its rows.
    """

    tokens: Int[Tensor, "rows width"]
    places: Int[Tensor, " tokens"]

    @classmethod
    def build(
        cls, prompt_lengths: Int[Tensor, " prompts"], lengths: Int[Tensor, " rows"], prompt_index: Int[Tensor, " rows"]
    ) -> FusedRows | None:
        """Returns the rows, or None where products of small matrices are used: see the module.

        Args:
            lengths: of the responses, which follow all prompts in the packed row.
            prompt_index: the prompt of each response.
        """
        if not len(lengths) or int(lengths.max()) < max(MIN_WIDTH, int(prompt_lengths.max())):
            return None
        own = prompt_lengths[prompt_index, None]
        starts = prompt_lengths.sum() + (lengths.cumsum(0) - lengths)[:, None]
        column = torch.arange(int((own[:, 0] + lengths).max()), device=lengths.device)
        of_prompt = (prompt_lengths.cumsum(0) - prompt_lengths)[prompt_index, None] + column
        real = column < own + lengths[:, None]
        tokens = torch.where(column < own, of_prompt, starts + column - own).where(real, 0)
        slots = torch.arange(tokens.numel(), device=lengths.device).view_as(tokens)[real]
        count = int(prompt_lengths.sum() + lengths.sum())
        places = slots.new_full((count,), tokens.numel()).scatter_reduce(0, tokens[real], slots, "amin")
        if int(places.max()) == tokens.numel():  # a prompt without a response
            return None
        return cls(tokens, places)

    def to(self, device: torch.device) -> FusedRows:
        return FusedRows(self.tokens.to(device), self.places.to(device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dtype: torch.dtype
    ) -> Float[Tensor, "1 tokens heads width"]:
        """Returns the attention of each packed token, as `packed_attention_forward` does, computed in `dtype`."""
        query, key, value = (self._spread(x, dtype) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places)[None].to(dtype)

    def _spread(self, packed: Float[Tensor, "1 heads tokens width"], dtype: torch.dtype) -> Tensor:
        # At least float32: a GPU sums the gradients of a prompt's keys over its rows in this dtype.
        wide = packed[0].transpose(0, 1).to(torch.promote_types(packed.dtype, torch.float32))
        rows = wide.index_select(0, self.tokens.flatten()).to(dtype)
        return rows.to(product_dtype(rows)).unflatten(0, self.tokens.shape).transpose(1, 2)
