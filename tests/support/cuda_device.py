"""The first CUDA device. Importing this file makes every point where PyTorch waits for it an `Event`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tests.support.device_events import LOG

DEVICE = torch.device("cuda")
_show = warnings.showwarning


def _record(message: Any, *arguments: Any, **named: Any) -> None:
    if "synchronizing CUDA operation" in str(message):
        LOG.add("wait")
    else:
        _show(message, *arguments, **named)


torch.zeros(1, device=DEVICE)
torch.cuda.set_sync_debug_mode("warn")
warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
warnings.showwarning = _record
