"""What a grid recommends, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.report.comparison_table import ComparisonTable, by_accuracy, markdown, recommend, summarize
from trimtab.report.experiment_page import write_experiment_page


def grid(
    before: float = 0.5, **methods: Sequence[float | None] | Mapping[str, Sequence[float | None]]
) -> ComparisonTable:
    """Accuracies by seed, in one regime or several."""
    rows = []
    for method, result in methods.items():
        regimes = result if isinstance(result, Mapping) else {"like-noise": result}
        for regime, values in regimes.items():
            for seed, value in enumerate(values):
                ended = {"status": "done" if value is not None else "diverged", "accuracy": value, "error": ""}
                curve = {"curve_steps": [0, 4], "curve": [before, value or 0.0]}
                rows.append(
                    {"method": method, "regime": regime, "seed": seed, "accuracy_before": before} | ended | curve
                )
    return summarize(rows)


def test_the_best_is_recommended_with_those_that_tie_with_it() -> None:
    # b is behind a by .02, -.01 and .03 with the same seeds; c by .3 with each.
    advice = recommend(grid(c=[0.6, 0.5, 0.55], a=[0.9, 0.8, 0.85], b=[0.88, 0.81, 0.82]))
    assert advice.method == "a"
    assert advice.text == (
        "Recommended: a, with 0.850 held-out accuracy (0.500 before). "
        "Seeds: 3, which cannot tell it from b. "
        "More seeds tell more: the same command with --seeds 5 adds them."
    )


def test_a_clear_lead_is_stated_in_numbers() -> None:
    advice = recommend(grid(a=[0.9, 0.8, 0.85], b=[0.8, 0.7, 0.75], c=[0.6, 0.5, 0.55]))
    assert "Seeds: 3, in which it is ahead of all others, of b by 0.100. More seeds" in advice.text
    many = recommend(grid(a=[0.9, 0.8, 0.85, 0.9, 0.9], b=[0.8, 0.7, 0.75, 0.8, 0.8]))
    assert many.text.endswith("Seeds: 5, in which it is ahead of all others, of b by 0.100.")
    assert recommend(grid(a=[0.9, 0.8])).text.endswith("It is the only method that was trained.")
    assert "Seeds: 2, which cannot tell it from b. More" in recommend(grid(a=[0.9, 0.8], b=[0.8, 0.81])).text


def test_fewer_than_three_seeds_give_no_lead() -> None:
    one = recommend(grid(a=[0.9], b=[0.5])).text
    assert "Seeds: 1, which cannot tell it from b. More seeds tell more" in one
    two = recommend(grid(a=[0.9, 0.9], b=[0.5, 0.5])).text
    assert "Seeds: 2, which cannot tell it from b." in two


def test_a_lead_over_regimes_is_one_of_the_mean_that_ranks_them() -> None:
    """b leads in one regime and trails in the other by more; by seed the means differ by .05, .05 and .05, or not."""
    b = {"x": [0.6, 0.6, 0.6], "y": [0.9, 0.9, 0.9]}
    clear = recommend(grid(a={"x": [0.8, 0.8, 0.8], "y": [0.8, 0.8, 0.8]}, b=b)).text
    assert "Seeds: 3, in which it is ahead of all others, of b by 0.050." in clear
    unclear = recommend(grid(a={"x": [0.9, 0.9, 0.6], "y": [0.8, 0.8, 0.8]}, b=b)).text
    assert "Seeds: 3, which cannot tell it from b." in unclear


def test_no_method_is_recommended_where_none_learns() -> None:
    sunk = recommend(grid(before=0.6, a=[0.5, 0.55], b=[0.1, None]))
    assert sunk.method is None
    assert sunk.text == (
        "No method learns at this mismatch: a, the best of 2, ends at 0.525 held-out accuracy (0.600 before). "
        "Lower the mismatch first (trimtab diagnose)."
    )


def test_over_several_levels_the_mean_decides_and_a_method_must_have_all() -> None:
    both = grid(
        a={"like-noise": [0.9, 0.9], "like-staleness": [0.6, 0.6]},
        b={"like-noise": [0.8, 0.8], "like-staleness": [0.75, 0.75]},
        only={"like-noise": [0.95, 0.95]},
    )
    assert by_accuracy(both) == ["b", "a", "only"]
    assert "b, with 0.775 held-out accuracy (0.500 before), the mean over like-noise and like-staleness." in (
        recommend(both).text
    )
    assert recommend(grid(a={"x": [0.9]}, b={"y": [0.9]})).method is None


def test_the_table_and_the_page_begin_with_the_best(tmp_path: Path) -> None:
    result = grid(c=[0.6, 0.5], a=[0.9, 0.8], b=[0.7, 0.7])
    rows = [line.split("`")[1] for line in markdown(result, by_accuracy(result)).splitlines()[2:]]
    assert rows == ["a", "b", "c"]
    text = recommend(result).text
    page = write_experiment_page(result, tmp_path / "p.html", methods=by_accuracy(result), verdict=text).read_text()
    assert f"<dd>{text}</dd>" in page
    places = [page.index(f"<bdi>{name}</bdi>") for name in ("a", "b", "c")]
    assert places == sorted(places)
