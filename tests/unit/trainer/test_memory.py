"""What fills the memory ends in one line; every other error keeps its traceback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.run import out_of_memory_as_user_error

PIB = 1 << 50


@pytest.mark.parametrize(
    "fill",
    [lambda: torch.empty(PIB, dtype=torch.uint8), lambda: np.ones(PIB, dtype=np.uint8), lambda: bytearray(PIB)],
    ids=["torch", "numpy", "python"],
)
def test_a_full_memory_is_one_line(fill: Callable[[], object]) -> None:
    line = r"the memory is full \(.+\): lower trainer.micro_batch_tokens"
    with pytest.raises(TrimtabError, match=line) as raised, out_of_memory_as_user_error():
        fill()
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), out_of_memory_as_user_error():
        torch.ones(2, 3) @ torch.ones(2, 3)
