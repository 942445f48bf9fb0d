"""Checks that changed weights arrive in the sampler: every tensor, and no log-probs cached under old weights.

If the sampler returns the tensors in use, they are first compared with the published tensors.

Every trained weight gets seeded noise. Before the noise is published, the mismatch must grow, or the check could see
nothing; afterwards it must return to its old size. A tensor that the sampler did not update is found even if its effect
is smaller than rounding. To first order, the effect on log-probs is their derivative along the tensor's change. One
backward pass of sum_t r_t log p_t, with r the remaining difference, gives the inner products of r with these
derivatives for all tensors. If a tensor stands out, the trainer gets its old value back: both must agree better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trimtab.diagnosis.records import CAUSES
from trimtab.preflight.engine_pair import EXACT, MARGIN, EnginePair, Outcome, ScoredResponses
from trimtab.text import join_names, short
from trimtab.trainer.models.lora import named_weights
from trimtab.types import Prompt

NOISE = 0.1
"""Standard deviation of the noise, relative to the root mean square of a tensor."""
ADAPTER_NOISE = 0.02
"""Standard deviation of the noise of `lora_B` matrices, which are initialized to 0."""
PROBES, PROBE_TOKENS = 32, 16
SUSPECT = 3.0
"""A tensor is tried if its mean inner product over responses is more than this many standard errors above 0."""
TRIED, MOST_STALE = 3, 12
"""Tensors tried in each round, of which the best keeps its old value; and the largest number of rounds."""
BETTER = 0.9
"""Restoring the old value of a stale tensor must reduce k3 to at most this fraction."""


def check_weights(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Outcome:
    """Publishes changed weights and names the tensors that did not arrive. Publishes the old weights at the end."""
    seen, unseen = pair.prompts[:PROBES], _never_asked(pair.prompts)
    before = pair.compare(seen, PROBE_TOKENS).k3
    limit = max(MARGIN * before, EXACT)
    try:
        with changed_weights(pair) as original:
            withheld, changed = pair.compare(seen, PROBE_TOKENS), _different(pair)
            pair.publish()
            wrong = _different(pair)
            published, fresh = (pair.compare(prompts, PROBE_TOKENS) for prompts in (seen, unseen))
            if wrong:
                problem, step = _undelivered(pair, wrong, changed), CAUSES["undelivered"].fix
            else:
                problem, step = _verdict(pair, original, (withheld, published, fresh), limit)
    finally:
        pair.publish()  # after an error too: a server goes on with these weights
    detail = (
        f"every trained weight changed by {NOISE:.0%}: k3 {short(before)} before, {short(withheld.k3)} while the "
        f"change is withheld, {short(published.k3)} once it is published"
    )
    figures = {"k3/before": before, "k3/withheld": withheld.k3, "k3/published": published.k3}
    figures["k3/new_prompts"] = fresh.k3
    if changed:
        figures["tensors/changed"], figures["tensors/different"] = float(len(changed)), float(len(wrong))
    if not problem:
        agree = f"; all {len(changed)} changed tensors are equal to the bit" if changed else ""
        return Outcome("ok", f"{detail}{agree}", "", figures)
    status = "note" if withheld.k3 <= limit and not wrong else "fail"
    return Outcome(status, f"{detail}; {problem}", step, figures)


def _never_asked(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the last `PROBES` prompts, each after an id with which no prompt begins: no prefix is cached."""
    first = {int(prompt.ids[0]) for prompt in prompts}
    inside = (int(id_) for prompt in prompts for id_ in reversed(prompt.ids))
    other = next((id_ for id_ in inside if id_ not in first), int(prompts[0].ids[-1]))
    return [replace(one, ids=np.concatenate([[other], one.ids])) for one in prompts[-PROBES:]]


def _different(pair: EnginePair) -> list[str]:
    """Returns the tensors whose values in the sampler differ from the trainer's, rounded to the sampler's dtype.

    Empty if the sampler does not return the tensors in use.
    """
    held = dict(pair.engine.named_weights()) if pair.weights_in_use else {}
    weights = ((name, tensor) for name, tensor in named_weights(pair.model) if name in held)
    return [name for name, tensor in weights if not torch.equal(held[name], tensor.to(held[name]))]


def _undelivered(pair: EnginePair, wrong: Sequence[str], changed: Sequence[str]) -> str:
    """Returns which tensors did not arrive, in words. changed: all tensors that the publication had to change."""
    if set(wrong) >= set(changed):
        return f"{_nothing_arrived(pair)}: all {len(changed)} changed tensors differ"
    return f"not published: {join_names(wrong)}; compared tensor by tensor"


def _nothing_arrived(pair: EnginePair) -> str:
    return "the adapter is not merged or not loaded" if pair.lora else "the update was not taken over"


def _verdict(
    pair: EnginePair,
    original: Mapping[str, Tensor],
    samples: tuple[ScoredResponses, ScoredResponses, ScoredResponses],
    limit: float,
) -> tuple[str, str]:
    """Returns what is wrong and what to do; empty texts if the new weights arrived."""
    withheld, published, fresh = samples
    if withheld.k3 <= limit:
        return f"a change cannot be seen beside a mismatch of {short(limit / MARGIN)}: repair that first", ""
    if fresh.k3 <= limit < published.k3:
        what = "only prompts asked before are wrong: cached under the old weights (stale-cache)"
        return what, CAUSES["stale-cache"].fix
    fix = CAUSES["undelivered"].fix
    if _equal(withheld, published):
        return f"{_nothing_arrived(pair)}: the sampler's log-probs are those of before, to the bit", fix
    versions = {int(version) for one in published.completions for version in one.policy_version}
    if versions != {pair.version}:
        return f"tokens carry version {sorted(versions)} and not {pair.version}", fix
    stale, left = stale_tensors(pair, published, original) if published.k3 > EXACT else ([], 0.0)
    if stale:
        others = " and others" if left > limit else ""
        return f"not published: {join_names(stale)}{others}; k3 {short(left)} with the old values in the trainer", fix
    if max(published.k3, fresh.k3) > limit:
        return "a part of the weights did not arrive", fix
    return "", ""


def _equal(a: ScoredResponses, b: ScoredResponses) -> bool:
    pairs = zip(a.completions, b.completions, strict=True)
    return np.array_equal(a.logp_behavior, b.logp_behavior) and all(
        np.array_equal(one.response_ids, other.response_ids) for one, other in pairs
    )


@contextmanager
def changed_weights(pair: EnginePair) -> Iterator[dict[str, Tensor]]:
    """Adds seeded noise to the trained weights (LoRA: `lora_B` only); yields the originals, and restores them."""
    trained = {name: p for name, p in pair.model.named_parameters() if p.requires_grad}
    if pair.lora:
        trained = {name: p for name, p in trained.items() if "lora_B" in name}
    original = {name: p.detach().clone() for name, p in trained.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in trained.values():
                size = ADAPTER_NOISE if pair.lora else NOISE * float(p.float().square().mean().sqrt())
                p.add_((size * torch.randn(p.shape, generator=generator)).to(p))
        yield original
    finally:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(original[name])


@torch.no_grad()
def stale_tensors(pair: EnginePair, scored: ScoredResponses, original: Mapping[str, Tensor]) -> tuple[list[str], float]:
    """Returns the tensors whose old values the sampler holds, and the k3 if the trainer has these old values too."""
    parameters = dict(pair.model.named_parameters())
    new = {name: parameters[name].clone() for name in original}
    found: list[str] = []
    left = scored.k3
    while len(found) < MOST_STALE and left > EXACT:
        tried = {}
        for name in _suspects(pair, scored, original)[:TRIED]:
            parameters[name].copy_(original[name])
            tried[name] = pair.score(scored.prompts, scored.completions).k3
            parameters[name].copy_(new[name])
        best = min(tried, key=lambda name: tried[name], default=None)
        if best is None or tried[best] > BETTER * left:
            break
        left = tried[best]
        found.append(best)
        parameters[best].copy_(original[best])
    return found, left


def _suspects(pair: EnginePair, scored: ScoredResponses, original: Mapping[str, Tensor]) -> list[str]:
    """Returns the tensors whose old values fit the sampler better, in order of significance."""
    changed = {
        name: p for name, p in pair.model.named_parameters() if name in original and not torch.equal(p, original[name])
    }
    products = []
    for index, completion in enumerate(scored.completions):
        row = slice(index, index + 1)
        with torch.enable_grad():
            logp = pair.logps(scored.prompts[row], [completion], scored.temperature)[0][0]
            left = torch.from_numpy(completion.logp_behavior).to(logp) - logp.detach()
            gradients = torch.autograd.grad((left * logp).sum(), list(changed.values()))
        steps = (original[name] - p for name, p in changed.items())
        products.append([float((g.double() * step).sum()) for g, step in zip(gradients, steps, strict=True)])
    values = np.array(products)
    errors = values.std(0, ddof=1) / np.sqrt(len(values))
    scores = dict(zip(changed, values.mean(0) / np.maximum(errors, 1e-30), strict=True))
    return sorted((name for name in scores if scores[name] > SUSPECT), key=lambda name: -scores[name])
