"""The tokenizer of the bundled model, loaded once, and copies of it with another chat template."""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import AutoTokenizer

from trimtab.trainer.models import bundled


@functools.cache
def bundled_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled.folder())


def tokenizer(template: str) -> Any:
    result = copy.copy(bundled_tokenizer())
    result.chat_template = template
    return result
