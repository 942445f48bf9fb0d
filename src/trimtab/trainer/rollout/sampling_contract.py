"""The sampling contract: refuses data whose importance ratios would be biased."""

from __future__ import annotations

from trimtab.errors import TrimtabError
from trimtab.types import Trajectory


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises `TrimtabError` if the importance ratios of a trajectory would be biased.

    They would be for greedy data; for "raw" log-probs under a processed distribution, where pi/mu is off by the
    temperature and by the mass that truncation removed; for truncated sampling without sampling masks, where the
    trainer would normalize over the whole vocabulary and every ratio would be low by the kept mass; and for masks that
    are not those of the tokens.
    """
    sampling, masks = trajectory.sampling, trajectory.completion.sampling_mask
    if sampling.temperature == 0:
        raise TrimtabError(
            "these tokens were decoded greedily (temperature 0) and carry no sampling probabilities; "
            "sample with temperature > 0"
        )
    drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k}"
    if sampling.logprobs == "raw" and (sampling.temperature != 1 or sampling.truncated):
        raise TrimtabError(
            f'log-probs are "raw" but the tokens were drawn under {drawn}: the ratio to the policy that really sampled '
            'would be biased; have the engine return "processed" log-probs, or sample at temperature 1 without '
            "truncation"
        )
    if not sampling.truncated:
        return
    if masks is None:
        raise TrimtabError(
            f"the tokens were drawn under {drawn} but carry no sampling masks: ratios over the whole vocabulary would "
            "be biased by the kept mass; use an engine that records them, or set top_p = 1 and top_k = 0"
        )
    ids, name = trajectory.completion.response_ids, f"response to {trajectory.prompt.problem.id!r}"
    if len(masks) != len(ids):
        raise TrimtabError(
            f"{name}: {len(masks)} sampling masks for {len(ids)} tokens; the engine must report one each"
        )
    for token, (id_, mask) in enumerate(zip(ids, masks, strict=True)):
        if id_ not in mask:
            raise TrimtabError(f"{name}, token {token}: id {id_} is not in its own sampling mask")
        if 0 < sampling.top_k < len(mask):
            raise TrimtabError(
                f"{name}, token {token}: {len(mask)} ids in its sampling mask under top_k {sampling.top_k}"
            )
