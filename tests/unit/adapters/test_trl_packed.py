"""The responses that are read back from a packed row, by hand."""

from __future__ import annotations

import torch

from trimtab.adapters.micro_batch import turns_of
from trimtab.adapters.trl_packed import VERSIONS, PackedResponses

# Samples 5 6 | 1 2 and 5 6 | 3 (9) 4, whose 9 is not trained, as TRL packs them: the first token of the prompt is
# shared, its last one is there twice, as it is before different tokens. Padding is for a longer row elsewhere.
ROW = {
    "input_ids": [5, 6, 1, 2, 6, 3, 9, 4, 0],
    "position_ids": [0, 1, 2, 3, 1, 2, 3, 4, 0],
    "shift_labels": [-100, 1, 2, -100, 3, -100, 4, -100, -100],
    "tree_kv_index": [0, 0, 1, 2, 3, 0, 4, 5, 6, 7, -1],
    "tree_cu_seqlens_q": [0, 1, 4, 8, -1],
    "tree_cu_seqlens_k": [0, 1, 5, 10, -1],
    "token_index": [1, 2, 4, 6, -1],
    "segment_id": [0, 0, 1, 1, 0],
    "old_log_probs": [-0.1, -0.2, -0.3, -0.4, 0.0],
    "advantages": [1.0, 1.0, -2.0, -2.0, 0.0],
    VERSIONS: [3, 2, 2, -1],
}


def test_the_responses_of_a_packed_row_are_read_back() -> None:
    """A third sample has no trained token: it is a response all the same, and counts where sequences are counted."""
    part = PackedResponses({name: torch.tensor([values]) for name, values in ROW.items()})
    assert part.mask.tolist() == [[True, True, False], [True, False, True], [False] * 3]
    expected = torch.tensor([[-0.1, -0.2, 0.0], [-0.3, 0.0, -0.4], [0.0, 0.0, 0.0]])
    assert torch.equal(part.behavior, expected)
    assert part.advantage.tolist() == [[1.0], [-2.0], [0.0]]
    assert part.version.tolist() == [3, 2, 2]
    assert part.length.tolist() == [2, 3, 0]
    assert part.prompt_ids == [[5, 6], [5, 6], []]
    assert part.response_ids.tolist() == [[1, 2, 0], [3, 9, 4], [0, 0, 0]]
    assert turns_of(part.mask).tolist()[1] == [0, 0, 1]


def test_a_value_of_a_packed_row_goes_to_every_sample_that_it_predicts_for() -> None:
    """Its gradient is the sum over these."""
    row = ROW | {"token_index": [1, 2, 1, 6, -1]}  # The first tokens of both responses are one position.
    part = PackedResponses({name: torch.tensor([values]) for name, values in row.items()})
    packed = torch.arange(9.0, requires_grad=True)
    rows = part.unpacked(packed)
    assert rows.tolist() == [[1.0, 2.0, 0.0], [1.0, 0.0, 6.0], [0.0] * 3]
    (rows * torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [1.0, 1.0, 1.0]])).sum().backward()
    assert packed.grad.tolist() == [0.0, 11.0, 2.0, 0.0, 0.0, 0.0, 30.0, 0.0, 0.0]
