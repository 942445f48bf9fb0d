"""Renders a tokenizer's chat template. A template that fails or does not end raises an error of one line.

transformers renders in jinja's immutable sandbox: a template can use text, numbers and lists, but nothing else of
Python. The sandbox limits a single `range` but not nested loops, so this module limits the time. A single operation,
such as a huge power, is not interrupted, and memory is not limited.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.errors import TrimtabError

SECONDS = 10.0


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns the text of a conversation; `options` are passed to `apply_chat_template`."""
    name = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
    result: list[str | BaseException] = []

    def work() -> None:
        try:
            result.append(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (Exception, SystemExit) as error:  # the code below ends this thread by SystemExit
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)  # the process must not wait for it when it exits
    thread.start()
    thread.join(SECONDS)
    if not result:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise TrimtabError(f"the chat template of {name!r} did not end within {SECONDS:g} s: use another tokenizer")
    if isinstance(result[0], BaseException):
        error = result[0]
        raise TrimtabError(
            f"the chat template of {name!r} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}; "
            "use another tokenizer, or a style or format that needs no chat template"
        ) from error
    return result[0]
