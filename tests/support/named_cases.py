"""One test over many cases that differ in a name: a failure says which."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def named(case: object) -> Iterator[None]:
    """Adds the name of the case to an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise


def in_one_test(parameter: str, cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize` of one parameter, and all cases are one test, which fails at the first that does."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for case in cases:
                with named(case):
                    test(**fixtures, **{parameter: case})

        signature = inspect.signature(test)
        others = [one for one in signature.parameters.values() if one.name != parameter]
        run.__signature__ = signature.replace(parameters=others)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate
