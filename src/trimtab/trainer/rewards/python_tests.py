"""The `python-tests` reward: runs the program in a response against the tests of its problem, in a sandbox."""

from __future__ import annotations

import re
from functools import cache

from pydantic import Field, field_validator

from trimtab.errors import TrimtabError
from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.trainer.sandbox.python_pool import PythonPool, SandboxName
from trimtab.types import Problem, Task

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class PythonTests(Reward):
    """1 if the program and then the problem's tests run without an error, else 0; running too long is an error.

    The program is the last fenced block of the response, or all of it. It has ended before the sandbox is given the
    tests, so that an early exit does not skip them. What its functions do when the tests call them is not prevented.
    """

    sandbox: SandboxName = Field("monty", description="`monty`, a part of Python; or `bubblewrap`, all of it")
    packages: tuple[str, ...] = Field((), description="installed packages that a program may import; bubblewrap only")
    seconds: float = Field(1.0, gt=0, le=1e6, description="that the program may take, and its tests again")
    memory_mb: int = Field(256, ge=1, le=65536, description="megabytes a run may use")
    program: str = Field("{code}", description="the Python program, with {code} where the response's code belongs")
    tests: str = Field("tests", description="column of the task's `extra`: Python with assertions, or a list of them")

    @field_validator("program")
    @classmethod
    def _has_code(cls, program: str) -> str:
        if "{code}" not in program:
            raise ValueError("write {code} where the code of the response belongs")
        return program

    def build(self, task: Task) -> Built:
        try:
            self._start().close()
        except TrimtabError as error:
            raise TrimtabError(f"reward 'python-tests': {error}") from None
        stops = task.stop
        pool = cache(self._start)  # called in the worker process that runs this reward

        def python_tests(response: Response, problem: Problem) -> float:
            tests = problem.extra.get(self.tests)
            if not tests:
                raise ValueError(f"the problem has no {self.tests!r}; name the column in the task's extra")
            body = response.body(stops)
            code = (_BLOCK.findall(body) or [body])[-1]
            lines = tests if isinstance(tests, str) else "\n".join(tests)
            with pool().session() as session:
                runs = (session.run(text) for text in (self.program.replace("{code}", code), lines))
                return float(all(run.error is None for run in runs))

        return Built(python_tests, isolated=True)

    def _start(self) -> PythonPool:
        limits = {"timeout": self.seconds, "memory_mb": self.memory_mb}
        return PythonPool(self.sandbox, workers=1, packages=self.packages, **limits)
