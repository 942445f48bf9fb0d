"""The check that changed weights arrive in the sampler, and that it returns no log-probs cached under old weights.

Every trained weight (LoRA: `lora_B` only) gets seeded noise. Before the noise is published, the mismatch must grow, or
the check could see nothing; afterwards it must return to its old size. If the sampler returns the tensors in use, they
are also compared with the published tensors, because the effect of a single old one may be smaller than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from trimtab.diagnosis.records import CAUSES
from trimtab.preflight.engine_pair import EXACT, MARGIN, Check, EnginePair, ScoredResponses
from trimtab.text import join_names, short
from trimtab.trainer.models.sharding import named_weights
from trimtab.types import Prompt

NOISE = 0.1
"""Standard deviation of the noise, relative to the root mean square of a tensor."""
ADAPTER_NOISE = 0.02
"""Standard deviation of the noise of `lora_B` matrices, which are initialized to 0."""
PROBES, PROBE_TOKENS = 32, 16


def check_weights(pair: EnginePair, _samples: Mapping[int, ScoredResponses]) -> Check:
    """Publishes changed weights and names the tensors that did not arrive. Publishes the old weights at the end."""
    seen, unseen = pair.prompts[:PROBES], _never_asked(pair.prompts)
    before = pair.compare(seen, PROBE_TOKENS).k3
    limit = max(MARGIN * before, EXACT)
    try:
        with changed_weights(pair):
            withheld, changed = pair.compare(seen, PROBE_TOKENS), _different(pair)
            pair.publish()
            wrong = _different(pair)
            published, fresh = (pair.compare(prompts, PROBE_TOKENS) for prompts in (seen, unseen))
            if wrong:
                left = f"not published: {join_names(wrong)}; compared tensor by tensor"
                everything = f"{_nothing_arrived(pair)}: all {len(changed)} changed tensors differ"
                problem, step = everything if set(wrong) >= set(changed) else left, CAUSES["undelivered"].fix
            else:
                problem, step = _verdict(pair, withheld, published, fresh, limit)
    finally:
        pair.publish()  # after an error too: a server goes on with these weights
    change = f"every trained weight changed by {NOISE:.0%}"
    if pair.lora:
        change = f"every lora_B matrix got noise of {ADAPTER_NOISE:g}"
    detail = (
        f"{change}: k3 {short(before)} before, {short(withheld.k3)} while the "
        f"change is withheld, {short(published.k3)} once it is published"
    )
    figures = {"k3/before": before, "k3/withheld": withheld.k3, "k3/published": published.k3}
    figures["k3/new_prompts"] = fresh.k3
    if changed:
        figures["tensors/changed"], figures["tensors/different"] = float(len(changed)), float(len(wrong))
    if not problem:
        agree = f"; all {len(changed)} changed tensors are equal to the bit" if changed else ""
        return Check("ok", f"{detail}{agree}", "", figures)
    status = "note" if withheld.k3 <= limit and not wrong else "fail"
    return Check(status, f"{detail}; {problem}", step, figures)


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


def _nothing_arrived(pair: EnginePair) -> str:
    return "the adapter is not merged or not loaded" if pair.lora else "the update was not taken over"


def _verdict(
    pair: EnginePair, withheld: ScoredResponses, published: ScoredResponses, fresh: ScoredResponses, limit: float
) -> tuple[str, str]:
    """Returns what is wrong and what to do; empty texts if the new weights arrived."""
    if withheld.k3 <= limit:
        return f"a change cannot be seen beside a mismatch of {short(limit / MARGIN)}: repair that first", ""
    if fresh.k3 <= limit < published.k3:
        what = "only prompts asked before are wrong: cached under the old weights (stale-cache)"
        return what, CAUSES["stale-cache"].fix
    fix = CAUSES["undelivered"].fix
    if np.array_equal(withheld.logp_behavior, published.logp_behavior):
        return f"{_nothing_arrived(pair)}: the sampler's log-probs are those of before, to the bit", fix
    versions = {int(version) for one in published.completions for version in one.policy_version}
    if versions != {pair.version}:
        return f"tokens carry version {sorted(versions)} and not {pair.version}", fix
    if max(published.k3, fresh.k3) > limit:
        return "a part of the weights did not arrive", fix
    return "", ""


@contextmanager
def changed_weights(pair: EnginePair) -> Iterator[None]:
    """Adds seeded noise to the trained weights inside (LoRA: `lora_B` only)."""
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
        yield
    finally:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(original[name])
