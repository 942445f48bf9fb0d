"""A Trimtab objective as a loss function of NeMo-RL. Checked against NeMo-RL 7ea279ab.

from trimtab.adapters.nemo_rl import ObjectiveLoss
grpo_train(..., loss_fn=ObjectiveLoss("icepop"), ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.hooks import METRICS, averaged, build, counted_state, per_response, turns_of
from trimtab.objectives import Objective, PolicyLogps

ERROR = "token_mult_prob_error"
"""A metric that NeMo-RL's training loop reads at every step."""


class ObjectiveLoss:
    """A loss function of NeMo-RL; its configuration has no name for one, so pass it to `grpo_train`.

    NeMo-RL divides by its own global counts, so that the aggregation must be token-mean or a mean over sequences.
    Samples that NeMo-RL masks (`sample_mask`) are not trained.
    """

    def __init__(self, objective: str | Objective, **keywords: Any) -> None:
        from nemo_rl.algorithms.loss.interfaces import (  # pyright: ignore[reportMissingImports]
            LossInputType,
            LossType,
            MetricNormalizer,
        )

        self.objective = build("nemo-rl", objective, keywords)
        tokens = self.objective.aggregation.kind == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if tokens else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB
        # What each metric is divided by, for the trainer that calls losses with counts of 1 and divides afterwards.
        self.metric_normalizations = {
            **dict.fromkeys((*(f"trimtab/{name}" for name in METRICS), ERROR), MetricNormalizer.TOKENS),
            "loss": MetricNormalizer.TOKENS if tokens else MetricNormalizer.SEQUENCES,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the shares of a micro-batch in the loss and the metrics of the update, which NeMo-RL adds up.

        next_token_logprobs: (batch, time - 1). The tensors of `data` are (batch, time), `sample_mask` (batch,). With
        `force_on_policy_ratio`, which fills `prev_logprobs` with zeros and allows one update a generation, the policy
        at the start of the update is the current one.
        """
        # Position t of the log-probs is token t + 1; data has a position more at the front.
        behind = {name: value[:, 1:] for name, value in data.items() if isinstance(value, Tensor) and value.ndim == 2}
        mask = (behind["token_mask"] * data["sample_mask"][:, None]).bool()
        proximal = behind.get("prev_logprobs")
        if proximal is not None and not bool(proximal[mask].any()):
            proximal = next_token_logprobs.detach()
        logps = PolicyLogps(
            current=next_token_logprobs,
            behavior=behind.get("generation_logprobs"),
            mask=mask,
            proximal=proximal,
            reference=behind.get("reference_policy_logprobs"),
            turn=turns_of(mask) if "turn" in self.objective.needs else None,
        )
        state = counted_state(global_valid_toks, global_valid_seqs, like=next_token_logprobs)
        advantage = per_response(self.objective, behind["advantages"], mask)
        output = self.objective(logps, advantage, state=state)
        share = (mask.sum() / global_valid_toks).item()
        metrics = {key: value * share for key, value in averaged(output.metrics.finalize()).items()}
        metrics |= {"loss": output.loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}
        return output.loss, metrics | {ERROR: _mismatch(logps, global_valid_toks)}


def _mismatch(logps: PolicyLogps, tokens: Tensor) -> float:
    """Returns the micro-batch's share of the mean of exp(|sampler - trainer|), which NeMo-RL's own loop reads."""
    if logps.behavior is None or logps.proximal is None:
        return 0.0
    gap = torch.where(logps.mask, logps.behavior - logps.proximal, 0.0).abs()
    return ((gap.exp() * logps.mask).sum() / tokens).item()
