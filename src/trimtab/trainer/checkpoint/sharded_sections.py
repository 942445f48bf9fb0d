"""Checkpoint sections that each rank writes in part and any number of ranks can read.

    model/shard-00001-model-00001-of-00001.safetensors     rank 0's part of every tensor, and its offsets

The files are those of `torch.distributed.checkpoint`'s Hugging Face storage: safetensors, with offsets in the header.
PyTorch's own `save` and `load` would send pickled plans between ranks. Here every rank makes its own plan: ranks of one
mesh own disjoint parts, and a reader finds all offsets in the headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Size, Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.models.sharding import is_sharded, local_shard


def write(folder: Path, named: Mapping[str, Tensor], rank: int) -> Path | None:
    """Writes this rank's part of `named` into the new `folder`; returns the file, or None if it has no part.

    The part is the local shard of each DTensor; rank 0 also writes the tensors that are not sharded. Raises `OSError`
    if the disk is full.
    """
    part = {
        name: tensor
        for name, tensor in named.items()
        if (local_shard(tensor).numel() if is_sharded(tensor) else rank == 0)
    }
    if not part:
        return None
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(part), is_coordinator=True)
    plan = replace(planner.create_local_plan(), storage_data={"shard_index": rank + 1})
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    (written, *_) = writer.write_data(planner.finish_plan(plan), planner).wait()
    return folder / written.storage_data.relative_path


class Shards(Mapping[str, Tensor]):
    """The tensors of a section that several ranks wrote.

    Indexing returns a whole tensor; `copy_into` fills existing tensors. Raises `TrimtabError` for unreadable headers.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise TrimtabError(f"{folder} is not a sharded section of a checkpoint: {error}") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shape_and_dtype(self, name: str) -> tuple[Size, torch.dtype]:
        """Returns shape and dtype of a whole tensor, without reading it."""
        metadata: Any = self._metadata.state_dict_metadata[name]
        return metadata.size, metadata.properties.dtype

    def copy_into(self, targets: Mapping[str, Tensor]) -> None:
        """Copies values into `targets` (this rank's shard of a DTensor); shapes and dtypes must match."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        parts = {name: target for name, target in targets.items() if local_shard(target).numel()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(parts), self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self.shape_and_dtype(name)
        whole = torch.empty(shape, dtype=dtype)
        self.copy_into({name: whole})
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self._metadata.state_dict_metadata)


def shape_and_dtype(tensors: Mapping[str, Tensor], name: str) -> tuple[Size, torch.dtype]:
    """Returns shape and dtype of a tensor in a section, sharded or not."""
    if isinstance(tensors, Shards):
        return tensors.shape_and_dtype(name)
    return tensors[name].shape, tensors[name].dtype


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors of a section into targets of the same names, shapes and dtypes; either side may be sharded."""
    if isinstance(tensors, Shards):
        tensors.copy_into(targets)
        return
    for name, target in targets.items():
        whole: Any = tensors[name]
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = target.device_mesh, target.placements  # pyright: ignore[reportAttributeAccessIssue]
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        local_shard(target).copy_(whole)
