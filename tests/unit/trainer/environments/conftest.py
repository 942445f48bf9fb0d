from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from trimtab.trainer.models import bundled


@pytest.fixture(scope="package")
def tokenizer() -> Any:
    """The bundled one. Each runner copies its tokenizer, which takes 0.1 s, for other threads: there are none here."""
    result = AutoTokenizer.from_pretrained(bundled.folder())
    result.__deepcopy__ = lambda _: result
    return result
