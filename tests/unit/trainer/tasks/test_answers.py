"""Gold answers out of what data sets store."""

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.trainer.tasks.answers import extract


@pytest.mark.parametrize(
    ("value", "form", "answer"),
    [
        (14.0, "number", "14"),
        (3.33333, "number", "3.33333"),
        (0.6666666667, "number", "0.6666666667"),
        (1e22, "number", "10000000000000000000000"),
        (-0.0, "number", "0"),
        (7, "number", "7"),
        ("025", "number", "25"),
        ("1,200", "number", "1200"),
        (" -3.50 ", "number", "-3.5"),
        ("−4", "number", "-4"),
        ("1/2", "number", "1/2"),
        (".5", "number", "0.5"),
        (Decimal("2.50"), "number", "2.5"),
        ("so 9 * 2 = <<9*2=18>>18.\n#### 18", "gsm8k", "18"),
        ("#### 4 no\n#### 2,125", "gsm8k", "2125"),
        ("x \\boxed{1} then $\\boxed{\\frac{1}{2}}$.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "boxed", "\\{1, 2\\}"),
        ("\\framebox{204} minutes", "boxed", "204"),
        ("\\boxed {a\\\\}", "boxed", "a\\\\"),
        ("  as it is ", "text", "as it is"),
        (27.0, "text", "27"),
    ],
)
def test_answers(value, form, answer):
    assert extract(value, form) == answer


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [
        (None, "text", "there is no answer"),
        ("  ", "number", "there is no answer"),
        (float("nan"), "number", "the answer is nan"),
        (True, "number", "the answer is a bool"),
        ([1], "text", "the answer is a list"),
        ("twelve", "number", "'twelve' is not a number"),
        ("1,20", "number", "is not a number"),
        ("1/0", "number", "is not a number"),
        (".", "number", "is not a number"),
        ("18", "gsm8k", "no '#### <number>' in '18'"),
        ("#### ", "gsm8k", "is not a number"),
        ("x = 5", "boxed", "no \\boxed{...} in 'x = 5'"),
        ("\\boxed{1", "boxed", "never closed"),
        ("\\boxed{ }", "boxed", "is empty"),
    ],
)
def test_what_is_no_answer_is_an_error(value, form, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        extract(value, form)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_their_value(value):
    assert float(extract(value, "number")) == value


balanced = st.recursive(
    st.sampled_from(["a", "1", " ", "\\{", "\\}"]),
    lambda inner: inner.map(lambda text: f"{{{text}}}") | st.tuples(inner, inner).map("".join),
    max_leaves=8,
)


@given(balanced.filter(str.strip))
def test_balanced_braces_come_out_whole(content):
    assert extract(f"so \\boxed{{{content}}} and {{more}}", "boxed") == content.strip()
