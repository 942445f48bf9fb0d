"""The process of an engine in a test, whose vLLM runs the model in a process of its own, as with tensor parallelism."""

from __future__ import annotations

from typing import Any

from trimtab.trainer.engines.remote import engine_host
from trimtab.trainer.engines.vllm import stepped_runner

arguments = stepped_runner.arguments


def split(*spec: Any) -> dict[str, Any]:
    return arguments(*spec) | {"distributed_executor_backend": "mp"}


if __name__ == "__main__":
    stepped_runner.arguments = split
    engine_host.main()
