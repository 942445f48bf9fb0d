"""A Trimtab objective as a loss function of NeMo-RL. Checked against NeMo-RL 7ea279ab.

from trimtab.adapters.nemo_rl import ObjectiveLoss
grpo_train(..., loss_fn=ObjectiveLoss("icepop"), ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import build, counted_state, per_response, reported, turns_of
from trimtab.objectives import Objective, PolicyLogps


class ObjectiveLoss:
    """A loss function of NeMo-RL; its configuration has no name for one, so pass it to `grpo_train`.

    NeMo-RL divides by its own global counts, so that the aggregation must be token-mean or a mean over sequences.
    Samples that NeMo-RL masks (`sample_mask`) are not trained.
    """

    def __init__(self, objective: str | Objective, **keywords: Any) -> None:
        from nemo_rl.algorithms.loss.interfaces import (  # pyright: ignore[reportMissingImports]
            LossInputType,
            LossType,
        )

        self.objective = build("nemo-rl", objective, keywords)
        tokens = self.objective.aggregation.kind == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if tokens else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the share of a micro-batch in the loss of the update, and metrics.

        next_token_logprobs: (batch, time - 1). The tensors of `data` are (batch, time), `sample_mask` (batch,).
        """
        # Position t of the log-probs is token t + 1; data has a position more at the front.
        behind = {name: value[:, 1:] for name, value in data.items() if isinstance(value, Tensor) and value.ndim == 2}
        mask = (behind["token_mask"] * data["sample_mask"][:, None]).bool()
        logps = PolicyLogps(
            current=next_token_logprobs,
            behavior=behind.get("generation_logprobs"),
            mask=mask,
            proximal=behind.get("prev_logprobs"),
            reference=behind.get("reference_policy_logprobs"),
            turn=turns_of(mask) if "turn" in self.objective.needs else None,
        )
        state = counted_state(global_valid_toks, global_valid_seqs, like=next_token_logprobs)
        advantage = per_response(self.objective, behind["advantages"], mask)
        output = self.objective(logps, advantage, state=state)
        metrics = reported(output.metrics.finalize()) | {"loss": output.loss.item()}
        return output.loss, {**metrics, "num_valid_samples": data["sample_mask"].sum().item()}
