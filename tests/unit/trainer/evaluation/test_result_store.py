"""An evaluation that stops anywhere goes on from there, and never with other settings."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.support.characters import Characters, response_of
from tests.support.fake_engine import FakeEngine

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.evaluation import evaluate
from trimtab.trainer.evaluation.result_store import PartFile, results_folder
from trimtab.types import SamplingParams

TASK = tasks.build("arithmetic", holdout=200)  # four batches
SAMPLING = SamplingParams(temperature=1.0, max_tokens=8, stop=TASK.stop)
SETTINGS = {"samples": 2, "seed": 0, "nested": {"temperature": 1.0}}
HEADER = {"model": {"weights": "abc"}, "stop": ("\n",)}


class Fragile(FakeEngine):
    """Counts its calls and dies in one of them."""

    def __init__(self, dies=None):
        right = {problem.id: [response_of(f" {problem.answer}"), response_of(" 7")] for problem in TASK.test[::3]}
        super().__init__({problem.id: right.get(problem.id, [response_of(" 7")]) for problem in TASK.test})
        self.calls, self.dies = 0, dies

    def generate(self, *arguments, **keywords):
        self.calls += 1
        if self.calls == self.dies:
            raise KeyboardInterrupt
        return super().generate(*arguments, **keywords)


def measured(engine, folder=None, header=HEADER):
    def go(memory):
        with rewards.build([], TASK) as scorer:
            return evaluate(
                engine, Characters(), TASK, scorer,
                problems=TASK.test, samples=2, sampling=SAMPLING, seed=0, store=memory,
            )  # fmt: skip

    if folder is None:
        return replace(go(None), seconds=0)
    with results_folder(folder, SETTINGS):
        return replace(go(PartFile(folder, "model task", header)), seconds=0)


def part_file(folder):
    [path] = (folder / "parts").iterdir()
    return path


@pytest.mark.parametrize("dies", [1, 2, 4])
def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path, dies):
    whole = measured(Fragile())
    with pytest.raises(KeyboardInterrupt):
        measured(Fragile(dies), tmp_path)
    again = Fragile()
    assert measured(again, tmp_path) == whole
    assert again.calls == 4 - (dies - 1)
    done = Fragile(dies=1)
    assert measured(done, tmp_path) == whole, "nothing is left to do: the engine is not asked"


def test_a_file_cut_at_any_byte_costs_one_batch(tmp_path):
    whole = measured(Fragile(), tmp_path)
    data = part_file(tmp_path).read_bytes()
    ends = [place for place, byte in enumerate(data, 1) if byte == ord("\n")]
    assert len(ends) == 5, "a header and four batches"
    cuts = {0, 1, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1]), *range(0, len(data), 997)}
    for cut in sorted(cuts):
        part_file(tmp_path).write_bytes(data[:cut])
        engine = Fragile()
        assert measured(engine, tmp_path) == whole, cut
        assert engine.calls == sum(end > cut for end in ends[1:]), cut
        kept = part_file(tmp_path).read_text().splitlines()
        assert {json.loads(line)["part"] for line in kept[1:]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"seed": 1}, r"seed = 0, this command has 1: repeat its settings, or choose another --out"),
        ({"nested": {"temperature": 0.5}}, r"nested.temperature = 1.0, this command has 0.5"),
        ({"problems": 8}, r"problems = nothing, this command has 8"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, changed, line):
    measured(Fragile(), tmp_path)
    before = part_file(tmp_path).read_bytes()
    with pytest.raises(TrimtabError, match=line), results_folder(tmp_path, SETTINGS | changed):
        pass
    assert part_file(tmp_path).read_bytes() == before
    with results_folder(tmp_path, SETTINGS):
        pass


def test_other_weights_are_refused(tmp_path):
    measured(Fragile(), tmp_path)
    with pytest.raises(TrimtabError, match=r'model\.weights = "abc", this command has "xyz"'):
        measured(Fragile(), tmp_path, {"model": {"weights": "xyz"}, "stop": ("\n",)})


def test_a_command_that_measured_nothing_does_not_fix_the_settings(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(Fragile(dies=1), tmp_path)
    with results_folder(tmp_path, SETTINGS | {"seed": 9}):
        assert PartFile(tmp_path, "model task", {"model": {"weights": "xyz"}}).get(0) is None


def test_models_with_equal_slugs_have_separate_results(tmp_path):
    first, second = PartFile(tmp_path, "a/b sort", HEADER), PartFile(tmp_path, "a-b sort", HEADER)
    assert first.path != second.path


def test_damage_is_named(tmp_path):
    measured(Fragile(), tmp_path)
    path = part_file(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    for bad in ("{}\n", "nonsense\n", '{"part": 1, "problems": [{"id": "x"}]}\n'):
        path.write_text("".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(TrimtabError, match=f"{path.name} is damaged: delete it"):
            measured(Fragile(), tmp_path)


@pytest.mark.e2e
def test_one_process_at_a_time(tmp_path):
    code = (
        "import sys; from pathlib import Path; from trimtab.trainer.evaluation.result_store import results_folder\n"
        "try:\n"
        "    with results_folder(Path(sys.argv[1]), {}): pass\n"
        "except ValueError as error: print(error)"
    )
    with results_folder(tmp_path, SETTINGS):
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "is in use by another evaluation" in done.stdout


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrimtabError, match=r"cannot write .*file.*choose another folder"):  # noqa: SIM117
        with results_folder(tmp_path / "file", SETTINGS):
            pass
