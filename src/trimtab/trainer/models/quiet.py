"""Silences the progress bars and reports of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL

from transformers.utils import logging


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disables transformers' progress bars and reports inside, because they would corrupt a live display.

    The content of the reports (missing or misshapen parameters) is checked by the caller and raised as an error.
    """
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
