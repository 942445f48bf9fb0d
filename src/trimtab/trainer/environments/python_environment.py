"""The environment "python": its only tool is a sandboxed Python interpreter."""

from __future__ import annotations

import functools
import textwrap
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trimtab.errors import TrimtabError
from trimtab.trainer import environments
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.background import EnvironmentFailed
from trimtab.trainer.environments.formats import ToolError
from trimtab.trainer.sandbox.code_result import GRACE, SESSION_LOST
from trimtab.trainer.sandbox.python_pool import PythonPool, PythonSession


class Options(BaseModel):
    """The keywords of the environment "python"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sandbox: Literal["monty", "bubblewrap"] = Field(
        "monty", description="`monty`: an interpreter without privileges; `bubblewrap`: CPython with `packages`"
    )
    packages: tuple[str, ...] = Field((), description="packages that the code may import (`bubblewrap`)")
    stateful: bool = Field(False, description="variables live on between the calls of an episode")
    seconds: float = Field(2.0, gt=0, le=3600, description="of one call")
    memory_mb: int = Field(256, ge=16, le=65536, description="of one call")
    max_output: int = Field(4096, ge=1, description="characters of output of one call")
    workers: int = Field(2, ge=1, le=256, description="calls that run at a time")

    def build(self, section: EnvironmentConfig) -> environments.BuiltEnvironment:
        """Returns the environment. All episodes share one pool of sandboxes."""
        lowest = self.seconds + GRACE
        if section.timeout < lowest:
            raise TrimtabError(
                f"environment.timeout = {section.timeout:g} s is below {lowest:g} s, which are `seconds` and the "
                f"{GRACE:g} s that the sandbox may need to end a call: raise timeout, or lower seconds"
            )
        try:
            pool = PythonPool(timeout=self.seconds, **self.model_dump(exclude={"seconds", "stateful"}))
        except TrimtabError as error:
            raise TrimtabError(f"environment.sandbox = {self.sandbox!r}: {error}") from None
        factory = functools.partial(PythonEnvironment, pool, stateful=self.stateful)
        return environments.BuiltEnvironment(section, "python", PythonEnvironment, factory, pool.close, self.workers)


class PythonEnvironment:
    """A Python interpreter as a tool. With `stateful`, the calls of an episode share variables."""

    def __init__(self, pool: PythonPool, *, stateful: bool) -> None:
        self._pool, self._stateful = pool, stateful
        self._session: PythonSession | None = None

    def reset(self, **row: Any) -> None:  # noqa: ARG002 - of the protocol
        self.close()
        self._session = self._pool.session() if self._stateful else None

    def python(self, code: str) -> str:
        """Runs Python code. Returns what it prints, and the value of its last line.

        Args:
            code: the code.
        """
        code = textwrap.dedent(code).strip()  # white space around the code in a tag is not indentation
        if self._session is not None:
            result = self._session.run(code)
        else:
            with self._pool.session() as session:
                result = session.run(code)
        if result.sandbox_failed:  # the code did not cause it: the episode is dropped
            raise EnvironmentFailed(f"failed: {result.error}")
        text = result.output.rstrip("\n")
        if result.error is not None:
            error = f"{result.error}; {SESSION_LOST}" if result.lost and self._stateful else result.error
            raise ToolError(f"{text}\n{error}" if text else error)
        return text

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
