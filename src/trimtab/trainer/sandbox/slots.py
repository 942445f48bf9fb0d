"""Things of which each is used by one thread at a time, whatever exception ends the use."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from trimtab.errors import TrimtabError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Slots(Generic[Item]):
    """Hands out items.

    An exception from outside, such as KeyboardInterrupt, may come between any two steps of Python, though not within a
    call of C. Taking an item and noting that it was taken is therefore one such call, and so is giving it back.

    Args:
        items: what is handed out.
        longest: seconds that one use takes at most. If none ends for twice as long, none will.
    """

    def __init__(self, items: Iterable[Item], longest: float) -> None:
        self._free: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for item in items:
            self._free.put(item)
        self._longest = longest
        self._ended = 0

    def use(self, action: Callable[[Item], Result]) -> Result:
        """Calls `action` with an item that no other thread uses, and waits for one where there is none.

        Raises:
            TrimtabError: no use ends any more.
        """
        taken: list[Item] = []
        try:
            while not taken:
                ended = self._ended
                try:
                    # In place of `taken.append(get(...))`, which an exception could leave between its two calls.
                    taken.extend(map(self._free.get, (True,), (2 * self._longest,)))
                except queue.Empty:
                    if ended == self._ended:
                        raise TrimtabError(
                            f"no process of the sandbox has become free for {2 * self._longest:g} s: make a new pool"
                        ) from None
            return action(taken[0])
        finally:
            if taken:
                self._free.put(taken[0])
                self._ended += 1
