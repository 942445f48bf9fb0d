"""A Hugging Face dataset, by name on the hub or as a local folder, as a task; columns as in `RowOptions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.tasks.rows import Row, RowOptions, build_task, read_problems
from trimtab.tasks.task import BuiltTask
from trimtab.types import Problem


class Options(RowOptions):
    dataset: str = Field(description="hub name, e.g. openai/gsm8k, or a local folder")
    config: str | None = Field(None, description="its configuration, e.g. main")
    split: str = Field("train", description="the split that is trained on")
    test_split: str | None = Field(None, description="another split for testing; then holdout is not used")
    files: str | None = Field(
        None, description="one file of the data set, or a pattern, e.g. train/math__*.parquet; they are the split train"
    )


def build(options: Options) -> BuiltTask:
    def read(split: str, row_options: RowOptions) -> list[Problem]:
        where = f"dataset {options.dataset!r}, split {split!r}"
        return read_problems(_rows(options, split, where), row_options, where, split)

    held_out = None if options.test_split is None else read(options.test_split, options.for_test_split)
    name = options.dataset.rstrip("/").rpartition("/")[2]
    return build_task(name, options, read(options.split, options), held_out, f"dataset {options.dataset!r}")


def _rows(options: Options, split: str, where: str) -> Iterator[Row]:
    import datasets

    try:
        loaded: Any = datasets.load_dataset(options.dataset, options.config, split=split, data_files=options.files)
    except Exception as error:  # network, missing names, damaged files: each library layer has its own classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrimtabError(
            f"{where}: cannot load it: {reason}; check the names, or the network and HF_HUB_OFFLINE"
        ) from None
    yield from enumerate(loaded, start=1)
