"""The sampling contract: refuses data whose importance ratios would be biased."""

from __future__ import annotations

from trimtab.errors import TrimtabError
from trimtab.types import SamplingParams, Trajectory


def check(sampling: SamplingParams, *, kept: bool) -> None:
    """Refuse data whose importance ratios would be biased.

    Args:
        sampling: the parameters that the tokens were sampled with.
        kept: whether every token has a sampling mask (`Completion.sampling_mask`).

    Raises:
        TrimtabError: greedy data; "raw" log-probs under a processed distribution, where pi/mu is off by the temperature
            and by the mass truncation removed; truncated sampling without sampling masks, where the trainer would
            normalise over the whole vocabulary and every ratio would be low by the kept mass.
    """
    if sampling.temperature == 0:
        raise TrimtabError(
            "these tokens were decoded greedily (temperature 0) and carry no sampling probabilities; "
            "sample with temperature > 0"
        )
    processed = sampling.temperature != 1 or sampling.truncated
    if sampling.logprobs == "raw" and processed:
        raise TrimtabError(
            f'log-probs are "raw" but the tokens were drawn under {_describe(sampling)}: the ratio to the policy that '
            'really sampled would be biased; have the engine return "processed" log-probs, or sample at temperature 1 '
            "without truncation"
        )
    if sampling.truncated and not kept:
        raise TrimtabError(
            f"the tokens were drawn under {_describe(sampling)} but carry no sampling masks: ratios over the whole "
            "vocabulary would be biased by the kept mass; use an engine that records them, or set top_p = 1 "
            "and top_k = 0"
        )


def check_trajectory(trajectory: Trajectory) -> None:
    """`check` for one trajectory and its sampling masks.

    Raises `TrimtabError` also for masks that do not fit its tokens: another number of them, a token outside its mask,
    more than top_k ids.
    """
    sampling, kept = trajectory.sampling, trajectory.completion.sampling_mask
    check(sampling, kept=kept is not None)
    if not sampling.truncated or kept is None:
        return
    ids, name = trajectory.completion.response_ids, f"response to {trajectory.prompt.problem.id!r}"
    if len(kept) != len(ids):
        raise TrimtabError(
            f"{name}: {len(kept)} sampling masks for {len(ids)} tokens; the engine must report one for each"
        )
    for token, (id_, mask) in enumerate(zip(ids, kept, strict=True)):
        if id_ not in mask:
            raise TrimtabError(
                f"{name}, token {token}: id {id_} is not in its own sampling mask, the ids it was drawn from"
            )
        if 0 < sampling.top_k < len(mask):
            raise TrimtabError(
                f"{name}, token {token}: {len(mask)} ids in its sampling mask under top_k {sampling.top_k}"
            )


def _describe(sampling: SamplingParams) -> str:
    parts = [f"temperature {sampling.temperature:g}"] if sampling.temperature != 1 else []
    parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    return ", ".join(parts)
