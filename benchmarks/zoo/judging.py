"""What the diagnosis says of computed faults, whether it is right, and the goals for each half of the kinds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.causes.candidates import group_by_test
from trimtab.diagnosis.measure.rescored_sides import judge_sides
from zoo.answers import NONE as NOTHING
from zoo.answers import diagnosed
from zoo.computed import compute, measured
from zoo.kinds import HEALTHY, KINDS, half
from zoo.layouts import layout_of, write
from zoo.plants import REFUSED
from zoo.sides import NONE, PRECISION, QUANTIZED, ROUTING, SAMPLING, VALUES, WEIGHTS, Kind
from zoo.tables import LARGE, SURE, percent, table

FAMILY: Mapping[str, str] = {
    **dict.fromkeys(
        ("placeholder", "non-finite", "misaligned", "retokenized", "log-base", "wrong-token", "copied"), VALUES
    ),
    **dict.fromkeys(("temperature", "raw-logprobs", "truncated-sampling"), SAMPLING),
    **dict.fromkeys(("undelivered", "stale", "stale-cache"), WEIGHTS),
    **{"routing": ROUTING, "quantized": QUANTIZED, "precision": PRECISION, NOTHING: NONE},
    REFUSED: VALUES,
}
"""The candidate of each cause; `unexplained` has none."""
OUTWEIGHED = 3.0
"""A fault whose k3 is less than this many times that of the base may be taken for its noise."""
REPEATED = 2
"""How many times healthy kinds are drawn again."""
CONSIDERED = 3
"""Number of candidates among which the true family should be, and of tests that find it."""


@dataclass(frozen=True)
class Said:
    """What a diagnosis says. first: the first cause, `none` or `refused`; kind: of answer (healthy, proven, fits,
    differential). candidates: most likely first. families: those that one test tells apart, in the order in which they
    are offered. wrong: the side that a rescored column accuses.
    texts: all that is said.
    """

    first: str
    confidence: float
    kind: str = ""
    candidates: tuple[str, ...] = ()
    families: tuple[tuple[str, ...], ...] = ()
    wrong: str = ""
    texts: str = ""

    @property
    def repairs_nothing(self) -> bool:
        return "Nothing has to be repaired" in self.texts


@dataclass(frozen=True)
class Judged:
    """One data set, what was said of it, and with the column of the right model beside (None: not tried)."""

    kind: Kind
    level: int
    tokens: int
    base: str
    layout: str
    k3: float
    outweighed: bool
    wrong: str
    said: Said
    rescored: Said | None = None

    @property
    def accepted(self) -> frozenset[str]:
        unproven = self.kind.possible if self.said.confidence < SURE else frozenset()
        return self.kind.accepted | unproven | ({NOTHING, "precision"} if self.outweighed else set())

    @property
    def right(self) -> bool:
        return self.said.first in self.accepted

    @property
    def sure_and_wrong(self) -> bool:
        return not self.right and self.said.confidence >= SURE and self.said.first not in (NOTHING, REFUSED)

    @property
    def side_found(self) -> bool:
        """Whether the column of the right model leads to the side that differs from it."""
        return self.rescored is not None and self.rescored.wrong == self.wrong

    @property
    def listed(self) -> bool:
        """Whether the true candidate is in one of the first families."""
        return self.among(self.said.families[:CONSIDERED])

    @property
    def found(self) -> bool:
        """Whether the column of the right model and a few tests lead to it."""
        return self.rescored is not None and self.among(self.rescored.families[:CONSIDERED])

    def among(self, named: Sequence[Collection[str]]) -> bool:
        """Whether one of these families has the true candidate; of wrong values, which are proven, the first cause."""
        if self.kind.families == {VALUES}:
            return self.right
        families = self.kind.families | ({NONE, PRECISION} if self.outweighed else set())
        return any(not families.isdisjoint(one) for one in named)


def read(diagnosis: Diagnosis) -> Said:
    """Reads what `trimtab diagnose` answers: the only function here that knows its fields.

    A proven cause, or a healthy answer, is its own first candidate.
    """
    answer, causes = diagnosis.answer, diagnosis.causes
    first, confidence = (causes[0].name, causes[0].confidence) if causes else (NOTHING, 1.0)
    is_first = answer.kind in ("healthy", "proven") and first in FAMILY
    left = [one for one in diagnosis.candidates if not is_first or one.name != FAMILY[first]]
    candidates = [one.name for one in left]
    tests = [tuple(one.name for one in family) for family in group_by_test(left)]
    if is_first:
        candidates, tests = [FAMILY[first], *candidates], [(FAMILY[first],), *tests]
    side = sides.side if (sides := judge_sides(diagnosis.measured.sample)) else ""
    return Said(first, confidence, answer.kind, tuple(candidates), tuple(tests), side, repr(answer))


def said_of(path: Path) -> Said:
    diagnosis = diagnosed(path)
    return Said(REFUSED, 1.0, candidates=(VALUES,), families=((VALUES,),)) if diagnosis is None else read(diagnosis)


@dataclass(frozen=True)
class Cell:
    """One data set of a kind. tokens: 0 for the responses of SmolLM2, where it was measured.

    rescored: whether it is diagnosed with the right model's column, too.
    """

    kind: Kind
    level: int
    tokens: int
    seed: int = 0
    rescored: bool = False


def plan(*, full: bool, seed: int = 0) -> list[Cell]:
    """Every kind at three strengths with 5,000 and 600 tokens; healthy kinds more often.

    full: at one strength with 50,000 tokens as well, and every eighth kind with 200,000.
    """
    sizes = [(tokens, level) for tokens in (5_000, 600) for level in range(3)]
    cells = [Cell(kind, level, tokens, 10 * seed, tokens >= LARGE) for tokens, level in sizes for kind in KINDS]
    for more in range(1, 1 + REPEATED):
        cells += [Cell(kind, level, tokens, 10 * seed + more) for tokens, level in sizes for kind in HEALTHY]
    cells += [Cell(kind, 1, 0, rescored=True) for kind in KINDS if measured(kind) is not None]
    if full:
        cells += [Cell(kind, 1, 50_000, 10 * seed) for kind in KINDS]
        cells += [Cell(kind, 1, 200_000, 10 * seed) for kind in KINDS[::8]]
    return cells


def described(one: Judged) -> str:
    where = f"{one.layout} on {one.base}, {one.tokens:,} tokens, strength {one.level}, k3 {one.k3:.1e}"
    nothing = ", nothing has to be repaired" if one.said.repairs_nothing else ""
    return f"{one.kind.name} ({where}): {one.said.kind} {one.said.first} {one.said.confidence:.2f}{nothing}"


def judge(cell: Cell) -> Judged:
    """Computes, writes and diagnoses a data set."""
    data = (measured(cell.kind) if cell.tokens == 0 else None) or compute(cell.kind, cell.level, cell.tokens, cell.seed)
    layout = layout_of(data, cell.seed)
    with tempfile.TemporaryDirectory() as folder:
        said = said_of(write(data, Path(folder) / "plain", layout))
        beside = said_of(write(data, Path(folder) / "rescored", "jsonl", rescored=True)) if cell.rescored else None
    weak = data.stream.k3 < OUTWEIGHED * data.noise
    return Judged(cell.kind, cell.level, data.tokens, data.base, layout, data.stream.k3, weak, data.wrong, said, beside)


def _share(results: Sequence[Judged], which: Callable[[Judged], bool]) -> str:
    """The share of data sets, each kind with the same weight."""
    parts = [[which(one) for one in results if one.kind is kind] for kind in KINDS]
    shares = [sum(part) / len(part) for part in parts if part]
    return f"{percent(sum(shares) / len(shares))} of {len(shares)}" if shares else "-"


def goals(results: Sequence[Judged]) -> str:
    """The goals over all kinds and over each half; a kind counts, not a data set."""
    faulty = lambda part: [one for one in part if not one.kind.healthy]  # noqa: E731
    proven = lambda part: [one for one in part if one.kind.detector and one.tokens >= LARGE and not one.outweighed]  # noqa: E731
    tried = lambda part: [one for one in faulty(part) if one.rescored is not None]  # noqa: E731
    nothing = lambda one: one.said.repairs_nothing and not one.kind.intended and not one.outweighed  # noqa: E731
    lines: Sequence[tuple[str, str, Callable[[list[Judged]], str]]] = (
        ("wrong with confidence 0.7 and more", "<= 1%", lambda part: _share(part, lambda one: one.sure_and_wrong)),
        (
            "the true candidate in the first three families",
            ">= 85%",
            lambda part: _share(part, lambda one: one.listed),
        ),
        (
            "the true candidate among the first three single ones",
            "",
            lambda part: _share(part, lambda one: one.among([one.said.candidates[:CONSIDERED]])),
        ),
        (
            "the true candidate in the first family, given the log-probs of the right model",
            "",
            lambda part: _share(tried(part), lambda one: one.among((one.rescored or one.said).families[:1])),
        ),
        (
            "the true candidate found by at most three tests, given the same",
            ">= 90%",
            lambda part: _share(tried(part), lambda one: one.found),
        ),
        (
            "that side named which is wrong, given the same",
            "",
            lambda part: _share(tried(part), lambda one: one.side_found),
        ),
        (
            "first cause right, 5,000 tokens and more, kinds that can be proven",
            ">= 95%",
            lambda part: _share(proven(part), lambda one: one.right),
        ),
        ('"Nothing has to be repaired" for a fault', "never", lambda part: _share(faulty(part), nothing)),
        (
            "healthy data called wrong",
            "<= 1%",
            lambda part: _share([one for one in part if one.kind.healthy], lambda one: not one.right),
        ),
    )
    rows = []
    for text, goal, line in lines:
        parts = ([one for one in results if half(one.kind.name) == side] for side in "ABCDEF")
        rows.append([text, goal, line(list(results)), *(line(part).partition(" of ")[0] for part in parts)])
    halves = ("half A", "half B", "C", "D", "E", "last: F")
    return table(["", "goal", "mean of all kinds", *halves], rows)


def kinds(results: Sequence[Judged]) -> str:
    """Each kind: its half, and in how many data sets its candidate was among the first and found.

    The last rows have the kinds of each half of which the candidate was found in all data sets.
    """
    parts = {kind: [one for one in results if one.kind is kind] for kind in KINDS}
    found = {kind: all(one.listed and (one.found or not one.rescored) for one in part) for kind, part in parts.items()}
    always = [kind for kind in KINDS if parts[kind] and found[kind]]
    groups = [([kind], part) for kind, part in parts.items() if kind not in always]
    for side in "ABCDEF":
        names = [kind for kind in always if half(kind.name) == side]
        groups.append((names, [one for kind in names for one in parts[kind]]))
    rows = []
    for names, part in groups:
        if not part:
            continue
        tried = [one.found for one in part if one.rescored]
        rows.append(
            [
                names[0].name if len(names) == 1 else f"{len(names)} others",
                half(names[0].name),
                percent(sum(one.listed for one in part) / len(part)),
                percent(sum(tried) / len(tried)) if tried else "",
            ]
        )
    return table(["kind", "half", "in the first three families", "found by tests"], rows)
