"""What the page of a real run says first: healthy runs, and runs with a fault each that was planted.

Their metrics were stored (`tests/support/health_runs.py`); one of them is trained anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from markupsafe import escape
from tests.support.health_runs import stored, trained

from trimtab.report.health import health
from trimtab.report.run_report import write_report
from trimtab.runs.reader import Run, read_run

pytestmark = pytest.mark.e2e


def verdict(run: Run) -> str:
    result = health(run)
    assert result.text.startswith(f"{result.learned}. ")
    return result.text.removeprefix(f"{result.learned}. ")


def test_a_run_that_is_trained_now_has_the_verdict_of_the_stored_one_on_its_page(tmp_path: Path) -> None:
    folder = trained("int3", tmp_path / "run")
    result = health(read_run(folder))
    before = health(stored("int3"))
    assert result.state == before.state
    assert [(item.status, item.name) for item in result.findings] == [
        (item.status, item.name) for item in before.findings
    ]
    page = write_report(folder).read_text()
    assert f"<dd>{escape(result.headline)}.</dd>" in page
    assert all(escape(finding.detail) in page for finding in result.findings)


@pytest.mark.parametrize("sampler", ["on-policy", "bf16", "int8"])
def test_the_laboratory_is_healthy(sampler: str) -> None:
    assert verdict(stored(sampler)) == "Healthy over 20 steps."


def test_no_run_with_samples_this_stale_is_called_healthy_and_a_correction_is_named() -> None:
    corrected, uncorrected = (verdict(stored(f"stale-{name}")) for name in ("token-tis", "dapo"))
    for text in (corrected, uncorrected):
        assert text.startswith("Not healthy over 64 steps: ")
        assert "beyond everything published" in text
    assert "of samples up to 31 updates old, for which token-tis corrects" in corrected
    assert "corrects" not in uncorrected


@pytest.mark.parametrize(
    ("name", "start", "words"),
    [
        ("lag-8", "Healthy over 40 steps, but k3 is ", "of samples up to 8 updates old, for which token-tis corrects"),
        ("int3", "Not healthy over 20 steps: ", "too much for a dense model"),
        ("collapse", "Not healthy over 24 steps: ", "held-out accuracy on sort fell from "),
        (
            "cut",
            "Not healthy over 6 steps: nothing was learned in 6 of 6 steps: every response got reward 0,",
            "of the responses were cut by the length limit",
        ),
    ],
)
def test_a_fault_is_named(name: str, start: str, words: str) -> None:
    text = verdict(stored(name))
    assert text.startswith(start)
    assert words in text
    assert "figures logged as not finite" not in text


def test_the_quickstart_is_healthy() -> None:
    """A small model in bfloat16: certain of most tokens, it has a correlation down to 0.97 in single steps."""
    run = stored("quickstart")
    result = health(run)
    assert result.state == "healthy", result.text
    assert result.text.startswith("Better than before: ")
    accuracy = run.accuracy()["arithmetic"]
    assert accuracy.before is not None
    assert accuracy.after is not None
    assert accuracy.after > accuracy.before + 0.3
