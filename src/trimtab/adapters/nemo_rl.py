"""A Trimtab objective as NeMo-RL's loss function, or a monitor beside NeMo-RL's own. Checked against 7ea279ab.

In a copy of examples/run_grpo.py, after `setup(...)`:

    loss_fn = ObjectiveLoss("icepop", replaces=loss_fn)
    loss_fn = RecordedLoss(loss_fn, monitor="monitor")  # NeMo-RL's own loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.hooks import build, peer_module
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import METRICS, averaged, counted_state, evaluate, record
from trimtab.adapters.recording import OBSERVED, MonitorChoice
from trimtab.errors import TrimtabError
from trimtab.objectives import KL, Objective, Output, PolicyLogps
from trimtab.objectives import objective as preset

ERROR = "token_mult_prob_error"
"""A metric that NeMo-RL's training loop reads at every step."""


class RecordedLoss:
    """NeMo-RL's own loss, bit for bit; a monitor also sees its log-probs.

    own: the loss that `setup` returns. monitor: True for the scalars and alarms of `trimtab.Monitor`, or a folder into
    which each process also writes its files.
    """

    def __init__(self, own: Any, *, monitor: MonitorChoice) -> None:
        self._own, self._monitor = own, monitor
        normalizer = peer_module("NeMo-RL", "nemo_rl.algorithms.loss.interfaces").MetricNormalizer
        added = dict.fromkeys((f"trimtab/{name}" for name in OBSERVED), normalizer.TOKENS)
        self.metric_normalizations = {**getattr(own, "metric_normalizations", {}), **added}

    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("_own")  # Not set yet while a copy is made. NeMo-RL reads the type of the loss, ...
        if own is None:
            raise AttributeError(name)
        return getattr(own, name)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns what NeMo-RL's loss returns, and this micro-batch's share of each scalar of the monitor."""
        logps, advantage = _read(next_token_logprobs.detach(), data)
        observed = averaged(record(logps, advantage, monitor=self._monitor))
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        loss, metrics = self._own(next_token_logprobs=next_token_logprobs, data=data, **counts, **inputs)
        share = (logps.mask.sum() / global_valid_toks).item()
        return loss, metrics | {key: value * share for key, value in observed.items()}


class ObjectiveLoss:
    """A Trimtab objective as loss function of NeMo-RL. Pass it to `grpo_train`: NeMo-RL's configuration cannot name it.

    replaces: the loss that `setup` returns; it says whether the model returns log-probs instead of logits. monitor: as
    for `RecordedLoss`, or None. NeMo-RL divides by its own global counts, so the aggregation must be token-mean or a
    mean over sequences. Samples that NeMo-RL masks (`sample_mask`) are not trained. Raises `TrimtabError` for keys of
    `loss_fn` that only the replaced loss reads.
    """

    def __init__(
        self, objective: str | Objective | None = None, *, replaces: Any, monitor: MonitorChoice = None, **keywords: Any
    ) -> None:
        self._monitor = monitor
        interfaces = peer_module("NeMo-RL", "nemo_rl.algorithms.loss.interfaces")
        normalizer = interfaces.MetricNormalizer
        self.objective = build("nemo-rl", objective, keywords)
        refuse_chosen("NeMo-RL", "NEMO_RL", replaces, "In ObjectiveLoss")
        if replaces.reference_policy_kl_penalty > 0 and self.objective.kl.coef == 0:
            raise TrimtabError(
                f"loss_fn.reference_policy_kl_penalty has no effect: {self.objective.name} has kl_coef = 0: set it, or "
                "loss_fn.reference_policy_kl_penalty=0"
            )
        tokens = self.objective.aggregation.kind == "token-mean"
        self.loss_type = interfaces.LossType.TOKEN_LEVEL if tokens else interfaces.LossType.SEQUENCE_LEVEL
        self.input_type = interfaces.LossInputType.LOGPROB
        self.use_fused_linear_logprobs = replaces.use_fused_linear_logprobs
        # If it is not 0, NeMo-RL also passes log-probs without top-k and top-p.
        self.reference_policy_kl_penalty = self.objective.kl.coef
        # The divisor of each metric, for NeMo-RL's trainer that calls losses with counts of 1 and divides afterwards.
        self.metric_normalizations = {
            **dict.fromkeys((*(f"trimtab/{name}" for name in METRICS), ERROR), normalizer.TOKENS),
            "loss": normalizer.TOKENS if tokens else normalizer.SEQUENCES,
            "num_valid_samples": normalizer.NONE,
        }

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns this micro-batch's share of the loss and of each metric of the update; NeMo-RL adds the shares up.

        next_token_logprobs: (batch, time - 1). The tensors of `data` are (batch, time), `sample_mask` (batch,). If
        `force_on_policy_ratio` is set, `prev_logprobs` is all zeros and each generation serves one update: the policy
        at the start of the update is then the current one.
        """
        given, advantage = _read(next_token_logprobs, data)
        mask = given.mask
        self._check_reference(mask, given.reference)
        counts, unfiltered = (global_valid_toks, global_valid_seqs), data.get("curr_logprobs_unfiltered")
        built = self.objective if unfiltered is None else replace(self.objective, kl=KL())
        loss, metrics, logps = evaluate(built, given, advantage, counts=counts, monitor=self._monitor)
        if unfiltered is not None:
            kl = self._unfiltered_kl(logps, counts, unfiltered)
            loss, metrics = loss + kl.loss, metrics | {"kl/mean": kl.metrics.finalize()["kl/mean"]}
        share = (mask.sum() / global_valid_toks).item()
        metrics = {key: value * share for key, value in averaged(metrics).items()}
        metrics |= {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}
        return loss, metrics | {ERROR: _mismatch(logps, global_valid_toks)}

    def _unfiltered_kl(self, logps: PolicyLogps, counts: tuple[Tensor, Tensor], current: Tensor) -> Output:
        """Returns the KL term from log-probs without top-k and top-p, because the reference is scored without them.

        current: (batch, time - 1) such log-probs. The policy term keeps those with top-k and top-p, like the sampler's.
        """
        # With advantages of 0, the loss is the KL term alone.
        kl = replace(preset("reinforce"), kl=self.objective.kl, aggregation=self.objective.aggregation)
        alone = replace(logps, current=current, proximal=current.detach())
        return kl(alone, torch.zeros_like(current[:, :1]), state=counted_state(*counts, like=current))

    def _check_reference(self, mask: Tensor, reference: Tensor | None) -> None:
        """Raises `TrimtabError` if the objective has a KL term and NeMo-RL computed no reference log-probs."""
        name = self.objective.name
        if self.objective.kl.coef == 0:
            return
        # NeMo-RL fills the column with zeros if it computes none.
        if reference is None or (bool(mask.any()) and not bool(reference[mask].any())):
            raise TrimtabError(
                f"{name} has kl_coef = {self.objective.kl.coef:g}, and NeMo-RL computes no reference log-probs: set "
                "loss_fn.reference_policy_kl_penalty=0.1 (only that it is above 0 counts)"
            )


def _read(current: Tensor, data: Mapping[str, Tensor]) -> tuple[PolicyLogps, Tensor]:
    """Returns the log-probs and the advantages, (batch, time - 1) each."""
    # Position t of the log-probs is token t + 1; `data` has one more position, at the front.
    behind = {name: value[:, 1:] for name, value in data.items() if isinstance(value, Tensor) and value.ndim == 2}
    mask = (behind["token_mask"] * data["sample_mask"][:, None]).bool()
    proximal = behind.get("prev_logprobs")
    if proximal is not None and not bool(proximal[mask].any()):
        proximal = current.detach()
    behavior, reference = behind.get("generation_logprobs"), behind.get("reference_policy_logprobs")
    return PolicyLogps(current, behavior, mask, proximal=proximal, reference=reference), behind["advantages"]


def _mismatch(logps: PolicyLogps, tokens: Tensor) -> float:
    """Returns the micro-batch's share of the mean of exp(|sampler - trainer|), which NeMo-RL's own loop reads."""
    if logps.behavior is None or logps.proximal is None:
        return 0.0
    gap = torch.where(logps.mask, logps.behavior - logps.proximal, 0.0).abs()
    return ((gap.exp() * logps.mask).sum() / tokens).item()
