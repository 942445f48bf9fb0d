"""Where historical responses are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer.config import PrefixConfig
from trimtab.trainer.rollout.prefixes import Rule, before_high_entropy, build_rule, prefix_tokens
from trimtab.types import Completion, FinishReason


def response(n: int, finish: FinishReason = "stop", entropy: list[float] | None = None) -> Completion:
    return Completion(
        response_ids=np.arange(10, 10 + n),
        logp_behavior=-np.arange(n, dtype=np.float32),
        policy_version=np.full(n, 3),
        finish_reason=finish,
        text="text",
        entropy=None if entropy is None else np.array(entropy, np.float32),
        sampling_mask=tuple(np.array([i]) for i in range(n)),
    )


def rule(name: str, ratio: float = 0.5, top: int = 32, whole: bool = True) -> Rule:
    return build_rule(PrefixConfig(rule=name, ratio=ratio, top=top, whole=whole))


@pytest.mark.parametrize(
    ("ratio", "length", "kept"),
    [
        (0.5, 11, 5),
        (0.3, 10, 3),
        (0.3, 11, 3),
        (0.29, 100, 29),
        (0.7, 10, 7),
        (0.0, 9, 0),
        (0.3, 10.99, 3),
        (0.9, 1, 0),
    ],
)
def test_the_share_of_a_length_is_its_floor(ratio: float, length: float, kept: int) -> None:
    assert prefix_tokens(ratio, length) == kept


def test_length_keeps_a_share_and_never_the_stop() -> None:
    ten = response(10)
    assert rule("length", 0.3).prefix(ten, 0.9).response_ids.tolist() == [10, 11, 12]
    assert rule("length", 0.99).prefix(response(3), 0.0).response_ids.tolist() == [10, 11]
    assert len(rule("length").prefix(response(1), 0.0).response_ids) == 0
    assert len(rule("length").prefix(response(0, "abort"), 0.0).response_ids) == 0


@given(n=st.integers(1, 40), kept=st.integers(0, 60), finish=st.sampled_from(["stop", "length"]))
def test_a_cut_keeps_every_field_in_step_and_drops_the_ending(n: int, kept: int, finish: FinishReason) -> None:
    whole = response(n, finish, entropy=list(range(n)))
    prefix = whole.truncated(kept)
    k = min(kept, n - 1 if finish == "stop" else n)
    assert prefix.response_ids.tolist() == list(range(10, 10 + k))
    assert prefix.logp_behavior.tolist() == [-i for i in range(k)]
    assert prefix.policy_version.tolist() == [3] * k
    assert prefix.entropy.tolist() == list(range(k))
    assert [ids.tolist() for ids in prefix.sampling_mask] == [[i] for i in range(k)]
    assert (prefix.finish_reason, prefix.text) == ("length", "")


def test_entropy_cuts_before_one_of_the_highest_positions() -> None:
    entropy = np.array([0.1, 2.0, 0.3, 5.0, 2.0, 0.0], np.float32)
    # In descending order: positions 3, 1, 4 (a tie keeps the order of the text), 2, 0, 5.
    assert [before_high_entropy(entropy, u, 3) for u in (0.0, 0.34, 0.67, 0.999)] == [3, 1, 4, 4]
    assert before_high_entropy(entropy, 0.999, 32) == 5  # fewer positions than `top`: all of them
    assert before_high_entropy(np.empty(0, np.float32), 0.5, 3) == 0
    prefix = rule("entropy", top=1).prefix(response(6, entropy=entropy.tolist()), 0.7)
    assert prefix.response_ids.tolist() == [10, 11, 12]  # the token at position 3 is sampled again


def test_entropy_chooses_uniformly() -> None:
    entropy = np.random.default_rng(0).random(40).astype(np.float32)
    draws = np.random.default_rng(1).random(4000)
    counts = np.bincount([before_high_entropy(entropy, u, 8) for u in draws], minlength=40)
    highest = np.sort(np.argsort(entropy)[-8:])
    assert np.flatnonzero(counts).tolist() == highest.tolist()
    assert np.abs(counts[highest] - 500).max() < 4 * np.sqrt(500)


def test_which_rules_need_the_whole_response() -> None:
    assert not rule("length", whole=False).whole
    assert rule("length", whole=True).whole
    assert rule("entropy", whole=False).whole


@pytest.fixture
def own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rules.py").write_text(
        "def middle(response_ids, entropy, uniform):\n    return int(uniform * len(response_ids))\n"
        "def all_of_it(response_ids, entropy, uniform):\n    return len(response_ids)\n"
        "def half(response_ids, entropy, uniform):\n    return len(response_ids) / 2\n"
        "def narrow(response_ids):\n    return 0\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_rules", raising=False)
    return "my_rules"


def test_a_users_own_rule(own_rules: str) -> None:
    custom = rule(f"{own_rules}:middle", whole=False)
    assert custom.whole
    assert len(custom.prefix(response(8), 0.5).response_ids) == 4


@pytest.mark.parametrize(("name", "answer"), [("all_of_it", "8"), ("half", "4.0")])
def test_an_answer_that_is_no_place_to_cut_is_named(own_rules: str, name: str, answer: str) -> None:
    with pytest.raises(
        TrimtabError, match=f"'{own_rules}:{name}' answered {answer} for a response of 8 tokens.*0 to 7"
    ):
        rule(f"{own_rules}:{name}").prefix(response(8, "length"), 0.5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lenght", "unknown prefix rule 'lenght'.*'length'.*module:function"),
        ("absent_module:f", "cannot import 'absent_module'"),
        ("my_rules:midle", "no 'midle' in .*'middle'"),
        ("my_rules:number", "is int, not a function"),
        ("my_rules:narrow", "must take 3 arguments"),
    ],
)
def test_rules_that_cannot_be_built_are_named(own_rules: str, name: str, words: str) -> None:
    del own_rules
    with pytest.raises(TrimtabError, match=words):
        rule(name)


def test_entropy_without_entropies_is_named() -> None:
    with pytest.raises(TrimtabError, match='does not report; use "length"'):
        rule("entropy").prefix(response(4), 0.5)
