"""Publication of weights: split into objects, and joined again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.trainer.cluster.ray_transport import pack_shards, unpack_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (1000 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(sorted(DTYPES)), min_size=12, max_size=12),
    limit=st.integers(1, 400),
)
def test_every_tensor_arrives_bit_for_bit_in_its_order(
    shapes: list[tuple[int, ...]], kinds: list[str], limit: int
) -> None:
    sent = [(f"w{i}", random(shape, DTYPES[kinds[i]], i)) for i, shape in enumerate(shapes)]
    shards = list(pack_shards(sent, limit))
    arrived = list(unpack_shards(shards))
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, before), (_, after) in zip(sent, arrived, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)
    for shard in shards:
        assert sum(array.nbytes for *_, array in shard) <= limit or len(shard) == 1


def test_objects_are_filled_up_to_their_limit() -> None:
    sent = [(name, random((10,), torch.float32)) for name in "abcde"]  # 40 bytes each
    sizes = [len(shard) for shard in pack_shards(sent, 85)]
    assert sizes == [2, 2, 1]


def test_matrices_are_sent_in_the_dtype_of_the_engine_and_vectors_unchanged() -> None:
    matrix, vector, counts = random((3, 4), torch.float32), random((4,), torch.float32), torch.arange(4).view(2, 2)
    sent = [("matrix", matrix), ("vector", vector), ("counts", counts)]
    arrived = dict(unpack_shards(pack_shards(sent, 1 << 20, torch.bfloat16)))
    assert torch.equal(arrived["matrix"], matrix.bfloat16())
    assert torch.equal(arrived["vector"], vector)
    assert torch.equal(arrived["counts"], counts)


def test_a_tied_tensor_is_sent_once_and_a_temporary_at_its_address_is_not_tied() -> None:
    tied = random((4, 4), torch.float32)
    assert [name for name, _ in unpack_shards(pack_shards([("a", tied), ("b", tied)], 1 << 20))] == ["a"]

    def temporaries():
        for i in range(50):  # each is dead when the next one takes its memory
            yield f"w{i}", torch.full((64,), float(i))

    arrived = dict(unpack_shards(pack_shards(temporaries(), 256)))
    assert [float(arrived[f"w{i}"][0]) for i in range(50)] == [float(i) for i in range(50)]
