"""The episode section of a report: parts of a response, shades, and runs without episodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from tests.support.trajectories import multi_turn, trajectory

from trimtab.pages.page import Part
from trimtab.report import run_report as module
from trimtab.report.run_report import episode_section, write_report
from trimtab.runs import trajectories
from trimtab.runs.reader import read_run
from trimtab.runs.trajectories import Row


def row(tokens: str, ratios: list[float], *, reward: float = 0.0) -> Row:
    """A response as `multi_turn` describes it; `ratios` are the log-ratios of its sampled tokens."""
    one = multi_turn(0, tokens, reward=reward)
    current = np.full(len(tokens), np.nan, dtype=np.float32)
    current[one.completion.sampled] = np.array(ratios, dtype=np.float32) - 1.0
    return Row(one, logp_current=current, advantage=0.0)


@pytest.fixture
def run(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    """A run without trajectory files."""
    return make_run(tmp_path / "run", steps=3, every=9, keys=["step"])


def save(run: Path, rows: list[Row], step: int = 3) -> Path:
    trajectories.write(run / "trajectories" / f"step-{step:06d}.parquet", rows, step)
    return run


def responses(run: Path) -> list[str]:
    """The HTML of each response of the section."""
    return [str(part) for part in section(run) if isinstance(part, Markup)]


def section(run: Path) -> list[Part]:
    return episode_section(read_run(run), 3, trajectories.read(run / "trajectories" / "step-000003.parquet"))


def test_parts_of_a_response_and_their_shades(run: Path) -> None:
    (text,) = responses(save(run, [row("ab..c", [0.2, -0.1, 0.0], reward=1.0)]))
    assert "turns: 2; results: 1; ended by stop<" in text
    shaded = re.findall(r'<span class="token (\w+)" style="--shade: (\d+)%"[^>]*>(\d+) </span>', text)
    # The run has no tokenizer: ids are shown.
    assert shaded == [("more", "100", "97"), ("less", "51", "98"), ("less", "0", "99")]
    assert re.findall(r'<span class="result">([\d ]+)</span>', text) == ["46 46 "]
    assert "only ids are shown" in section(run)[0].text


def test_responses_are_shown_from_the_highest_reward_to_the_lowest(run: Path) -> None:
    rows = [row("a.b", [0.0, 0.1], reward=float(index)) for index in range(20)]
    rewards = [float(re.findall(r">reward ([\d.]+)<", text)[0]) for text in responses(save(run, rows))]
    assert (rewards[0], rewards[-1], len(rewards)) == (19, 0, module.EPISODES_SHOWN)
    assert rewards == sorted(rewards, reverse=True)


def test_a_void_response_is_named_as_masked_and_a_long_one_is_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_SHOWN", 2)
    void = row("a.bc", [0.0, 0.1, 0.2])
    masked = replace(void.trajectory, loss_mask=np.zeros(4, dtype=np.bool_))
    (text,) = responses(save(run, [replace(void, trajectory=masked)]))
    assert "; masked<" in text
    assert " … (2 more tokens)</pre>" in text


def test_a_run_without_results_has_no_section(run: Path) -> None:
    plain = Row(trajectory(0, [1, 2]), logp_current=np.zeros(2, dtype=np.float32), advantage=0.0)
    assert section(save(run, [plain])) == []


def test_signs_and_tabs_that_a_model_wrote_stay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "token_texts", lambda _path, ids: (dict.fromkeys(ids, "␣\t\n"), ""))
    (text,) = responses(save(run, [row("a.b", [0.2, 0.1])]))
    assert "␣\t↵\n" in text


def test_the_page_escapes_what_a_model_wrote(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "token_texts", lambda _path, ids: (dict.fromkeys(ids, "<script>"), ""))
    page = write_report(read_run(save(run, [row("a.b", [0.2, 0.1])]))).read_text()
    part = page[page.index("<h2>Episodes</h2>") : page.index("<h2>Sampled completions")]
    assert "<script>" not in part
    assert part.count("&lt;script&gt;") == 3
    assert 'class="result">&lt;script&gt;</span>' in part
