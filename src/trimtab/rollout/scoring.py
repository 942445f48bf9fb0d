"""The scoring thread: rewards run while engines generate and the trainer trains."""

from __future__ import annotations

import threading

from trimtab.rollout.collector import CollectStats
from trimtab.rollout.engine_thread import Answers, Floor


class Scoring:
    """Scores requests one after another, the oldest groups first, and puts what can be used into the buffer."""

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def _run(self) -> None:
        try:
            while (answers := self._next()) is not None:
                self._score(answers)
        except BaseException as error:
            self.floor.fail(error)

    def _next(self) -> Answers | None:
        floor = self.floor
        with floor.buffer.changed:
            floor.scoring = False
            floor.buffer.changed.notify_all()
            floor.buffer.changed.wait_for(lambda: floor.closed or floor.unscored)
            if floor.closed:
                return None
            first = min(floor.unscored, key=lambda answers: answers.request.first)
            floor.unscored.remove(first)
            floor.scoring = True
            return first

    def _score(self, answers: Answers) -> None:
        buffer, stats = self.floor.buffer, answers.stats
        if buffer.wanted(answers.request):
            groups = self.floor.collector.grade(answers.request, answers.prompts, answers.completions, stats)
            buffer.deliver(answers.request, groups, stats)
            return
        # Too old for every batch to come: its score is not needed, but its lengths show what discarding favors.
        lengths = [len(answer.response_ids) for group in answers.completions for answer in group]
        stats.add(CollectStats(generated=len(lengths), response_tokens=sum(lengths), discarded_lengths=lengths))
        buffer.count(stats)
