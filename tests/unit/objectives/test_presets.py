"""Presets: keywords, refusals, and the printed equation. All defaults are in docs/methods.md, which is kept equal."""

from __future__ import annotations

from tests.support.named_cases import in_one_test

from trimtab.objectives import keywords_of, objective, objectives


@in_one_test("name", objectives())
def test_every_keyword_changes_the_objective_and_the_equation(name):
    changed = {"aggregation": "seq-mean-token-sum", "length_max": 7, "denominator": "kept", "kl": "k1", "form": "mask"}
    bases = {"length_max": {"aggregation": "constant", "length_max": 6}, "kl": {"kl_coef": 0.1}}
    if name not in ("luffy", "score-centering"):  # they take no mask, without which `denominator` has no effect
        bases["denominator"] = {"mask": [{"kind": "veto"}]}
    for key, default in keywords_of(name).items():
        if key == "denominator" and key not in bases:
            continue
        if key in changed:
            value = changed[key]
        elif isinstance(default, bool):
            value = not default
        elif isinstance(default, int):
            value = default + 1
        else:
            value = {"weight_min": 0.25, "keep_min": 0.25, "quantile": 0.5}.get(key, (default or 1.0) * 1.5)
        base = bases.get(key, {})
        before, after = objective(name, **base), objective(name, **{**base, key: value})
        assert before != after, key
        assert before.equation() != after.equation(), key
