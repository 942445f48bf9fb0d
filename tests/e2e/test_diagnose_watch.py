"""`trimtab diagnose --watch` beside a process that writes, ended by signals."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import pytest

pytestmark = pytest.mark.e2e

LIMIT = 120.0  # seconds after which a line that should have come is a failure
WRITER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
def line(trainer):
    return json.dumps({"logp_behavior": [-1.0] * 8, "logp_current": [trainer] * 8}) + "\\n"
cut = line(-1.01)
with (folder / "step-000001.jsonl").open("w") as first:
    first.write(line(-1.01) + cut[:30])
    first.flush()
    (folder / "step-000002.jsonl").write_text(line(-2.0))
    input()
    first.write(cut[30:])
"""


class Watching:
    """The command, with its lines as they come."""

    def __init__(self, *arguments: str | Path) -> None:
        self.seen: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimtab", "diagnose", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def until(self, start: str) -> str:
        """Waits for a line that begins so."""
        while True:
            line = self._lines.get(timeout=LIMIT)
            self.seen.append(line)
            if line.startswith(start):
                return line

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Sends the signal; returns the exit status and the last line."""
        self.process.send_signal(number)
        code = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        while not self._lines.empty():
            self.seen.append(self._lines.get())
        return code, self.seen[-1]

    def __enter__(self) -> Watching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        self._reader.join(LIMIT)


def test_a_step_that_is_half_written_an_alarm_and_ctrl_c(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    with Watching("--watch", folder, "--every", "0.2") as watching:
        assert "does not exist yet" in watching.until("watching")
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, text=True) as writer:
            watching.until("step 2: k3 0.37")
            assert not any(line.startswith("step 1") for line in watching.seen), "its last line is unfinished"
            watching.until("ALARM step 2: k3 0.37 is above 0.01: ")
            assert json.loads((folder / "ALARM.json").read_text())["latest"]["step"] == 2
            writer.communicate("\n")
        assert "2 responses, 16 tokens" in watching.until("step 1: ")
        assert watching.end(signal.SIGINT) == (1, "watched 2 steps, 1 alarm")
        assert watching.process.stderr is not None
        assert watching.process.stderr.read() == ""


def test_json_lines_and_sigterm_without_an_alarm(tmp_path: Path) -> None:
    row = {"step": 7, "logp_behavior": [-1.0] * 8, "logp_current": [-2.0] * 8}
    (tmp_path / "7.jsonl").write_text(json.dumps(row) + "\n")
    with Watching("--watch", tmp_path, "--every", "0.05", "--json", "--bound", "k3=1,ess_token=") as watching:
        values = json.loads(watching.until("{"))
        assert (values["step"], values["alarms"], values["tokens"]) == (7, [], 8)
        code, last = watching.end(signal.SIGTERM)
        assert code == 0
        assert json.loads(last) == values, "standard output holds JSON lines only"
    assert not (tmp_path / "ALARM.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no FILE given"),
        (("a.jsonl", "--watch", "dump"), "leave out FILE"),
        (("a.jsonl", "--bound", "k3=1"), "--bound is only valid with --watch"),
        (("--watch", "dump", "--bound", "x=1"), "unknown figure 'x'"),
        (("--watch", __file__), "is not a folder: name the folder of the data"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from trimtab.cli import main

    assert main.run(["diagnose", *arguments]) == 2
    assert message in capsys.readouterr().err
