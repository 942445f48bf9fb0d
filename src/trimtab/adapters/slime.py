"""Trimtab's corrections and objectives in Miles and slime. Checked against Miles 31f1ca96 and slime 624b824a.

    --use-tis --custom-tis-function-path trimtab.adapters.slime.tis --custom-config-path trimtab.yaml
    --loss-type custom_loss --custom-loss-function-path trimtab.adapters.slime.loss --custom-config-path trimtab.yaml

`tis` corrects the trainer's own loss, `loss` replaces it. trimtab.yaml names an objective, or its name and keywords:

    trimtab_objective: {name: icepop, weight_min: 0.5}
    trimtab_monitor: true  # optional: `trimtab.Monitor`; or a folder into which each process also writes its files

With `trimtab_monitor` alone, a monitor watches the trainer's own loss:

    --get-mismatch-metrics --custom-tis-function-path trimtab.adapters.slime.tis --custom-config-path trimtab.yaml
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.hooks import build, hook, peer_module, refuse_standard_deviation
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import averaged, evaluate, turns_of, usable_tokens
from trimtab.adapters.recording import OBSERVED, observations
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps, correct

SCORING = {
    "miles": "miles.backends.training_utils.loss_hub.logit_processors",
    "slime": "slime.backends.megatron_utils.loss",
}
"""The module of `get_log_probs_and_entropy` in Miles and in slime."""


def tis(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Returns the trainer's own loss times the weight and the masks of an objective, then the loss masks, and metrics.

    pg_loss: flat over all responses; the other inputs are lists with one (time,) tensor per response. Rejected tokens,
    and tokens that `usable_tokens` leaves out, get the weight 0. The loss masks, and so the denominators, do not
    change. The loss does not change either with `--get-mismatch-metrics` in place of `--use-tis`, or with
    `trimtab_monitor` and no objective. Raises `TrimtabError` for an objective without weight and masks, or with a part
    that reads the current policy or advantages, which this hook does not pass, and for `--use-tis` without objective.
    """
    monitor = observations(getattr(args, "trimtab_monitor", None))
    records = monitor is not None and getattr(args, "trimtab_objective", None) is None
    if records and args.use_tis:
        raise TrimtabError(
            "--use-tis with this function and no trimtab_objective would leave the trainer's own correction out: set "
            "--get-mismatch-metrics in its place, or name an objective"
        )
    built = None if records else _objective(args, "custom_tis_function_path")
    if built is not None:
        if built.weight is None and not built.masks:
            raise TrimtabError(f"{built.name} has no weight and no mask: this hook applies only these")
        parts = (*built.masks, *([] if built.weight is None else [built.weight]))
        if unread := frozenset().union(*(part.reads for part in parts)) & {"current", "advantage"}:
            names = " and ".join(sorted(unread))
            raise TrimtabError(f"{built.name} reads {names}, which this hook does not pass: use loss")
        refuse_chosen(hook(_trainer()).trainer, "MILES_TIS", args, "In trimtab_objective")
    _check_whole(train_log_probs, response_lengths)
    mask, trainer, behavior = _pad(loss_masks).bool(), _pad(train_log_probs), _pad(rollout_log_probs)
    shown = {} if monitor is None else monitor.show(PolicyLogps(None, behavior, mask, proximal=trainer))
    figures = {f"trimtab/{key}": torch.full_like(pg_loss, shown[key]).nan_to_num() for key in OBSERVED if shown}
    if built is None:
        return pg_loss, list(loss_masks), figures
    kept = usable_tokens(mask, behavior, trainer)
    result = correct(trainer, behavior, kept, weight=built.weight, masks=built.masks, turn=turns_of(mask))
    weight, keep = (_flat(value.to(pg_loss), response_lengths) for value in (result.weight, result.keep))
    trained, usable = (_flat(values.to(pg_loss), response_lengths) for values in (mask, kept))
    metrics = {
        **figures,
        "trimtab/weight/mean": weight.clone(),
        "trimtab/reject/tokens": usable - keep,
        "trimtab/unscored_tokens": trained - usable,
    }
    return pg_loss * weight * keep if args.use_tis else pg_loss, list(loss_masks), metrics


def loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of an objective, before Miles or slime divides it by its counts, and metrics.

    The aggregation must be token-mean with `--calculate-per-token-loss`, otherwise seq-mean-token-mean. Without
    `log_probs` in the batch, the policy at the start of the update is the current one. Raises `TrimtabError` if the
    trainer's settings leave out a policy that the objective reads, and for rollouts of several samples, because the
    trainer takes one mean over all samples of a rollout.
    """
    built = _objective(args, "custom_loss_function_path")
    wanted = "token-mean" if args.calculate_per_token_loss else "seq-mean-token-mean"
    if built.aggregation.kind != wanted:
        raise TrimtabError(
            f"{built.name} aggregates by {built.aggregation.kind!r}, this run by {wanted!r}: set aggregation in "
            "trimtab_objective, or change --calculate-per-token-loss"
        )
    _check_settings(built, args, batch)
    lengths = batch["response_lengths"]
    current_logps = _log_probs(args, batch, logits)
    _check_whole(current_logps, lengths)
    current, mask = _pad(current_logps), _pad(batch["loss_masks"]).bool()
    named = {"behavior": "rollout_log_probs", "proximal": "log_probs", "reference": "ref_log_probs"}
    policies = {ours: _pad(batch[theirs]) for ours, theirs in named.items() if batch.get(theirs)}
    logps = PolicyLogps(current, mask=mask, **{"behavior": None, "proximal": current.detach(), **policies})
    monitor = getattr(args, "trimtab_monitor", None)
    value, metrics, _ = evaluate(built, logps, _pad(batch["advantages"]), counts=(1, 1), monitor=monitor)
    # The trainers add up the values of all micro-batches and divide by the sequences or tokens of the update, so each
    # mean is multiplied by the sequences or tokens of this micro-batch.
    size = sum_of_sample_mean(torch.ones_like(torch.cat(list(current_logps)))).detach()
    values = {key: torch.tensor(number).to(size) * size for key, number in averaged(metrics).items()}
    return value, {"loss": value.detach().clone(), **values}


def _objective(args: Namespace, flag: str) -> Objective:
    given = getattr(args, "trimtab_objective", None)
    if given is None:
        raise TrimtabError(f"--{flag.replace('_', '-')} needs trimtab_objective in the file of --custom-config-path")
    keywords = {"name": given} if isinstance(given, str) else given
    if not isinstance(keywords, Mapping) or not isinstance(keywords.get("name"), str):
        raise TrimtabError(f"trimtab_objective = {given!r}: give the name of an objective, or {{name: icepop, ...}}")
    keywords = dict(keywords)
    return build(_trainer(), keywords.pop("name"), keywords)


def _trainer() -> str:
    """Returns `miles` or `slime`: the one that is installed or, if both are, the one that is imported."""
    installed = [name for name in SCORING if name in sys.modules or importlib.util.find_spec(name) is not None]
    return next((name for name in installed if name in sys.modules), installed[0] if installed else "slime")


def _check_settings(objective: Objective, args: Namespace, batch: Mapping[str, Any]) -> None:
    """Raises `TrimtabError` for settings of the trainer that would make the loss differ from the named objective."""
    refuse_chosen(hook(_trainer()).trainer, "MILES", args, "In trimtab_objective")
    if (estimator := getattr(args, "advantage_estimator", "grpo")) in ("gspo", "cispo"):
        raise TrimtabError(
            f"--advantage-estimator {estimator} names a loss, which this one replaces: set grpo, and {estimator} in "
            "trimtab_objective"
        )
    divides = getattr(args, "grpo_std_normalization", False)
    refuse_standard_deviation(objective, divides, "set --disable-grpo-std-normalization")
    if objective.kl.coef == 0 and getattr(args, "use_kl_loss", False):
        raise TrimtabError(f"--use-kl-loss has no effect: {objective.name} has kl_coef = 0: set it, or leave this out")
    if objective.kl.coef > 0 and not batch.get("ref_log_probs"):
        raise TrimtabError(
            f"{objective.name} has kl_coef = {objective.kl.coef:g}, and no reference log-probs are passed: set "
            "--use-kl-loss, with --kl-loss-coef 0"
        )
    if "proximal" in objective.needs and getattr(args, "use_rollout_logprobs", False):
        raise TrimtabError(
            f"{objective.name} reads the log-probs at the start of the update, and --use-rollout-logprobs leaves them "
            "out: turn it off"
        )
    if args.calculate_per_token_loss or batch.get("rollout_mask_sums") is None:
        return
    trained = zip(batch["loss_masks"], batch["rollout_mask_sums"], strict=True)
    if any(int(mask.sum()) != int(size) for mask, size in trained):
        raise TrimtabError(
            "a rollout of several samples counts once in this run, and each of its samples in seq-mean-token-mean: "
            "set --calculate-per-token-loss and the aggregation token-mean"
        )


def _log_probs(args: Namespace, batch: Mapping[str, Any], logits: Tensor) -> list[Tensor]:
    """Returns the current log-probs of each response, as the trainer's own loss computes them."""
    score = _score_function()
    optional = {
        # slime renormalizes over the tokens that top-p kept at sampling, as it did for the log-probs in the batch.
        "top_p_token_ids": batch.get("rollout_top_p_token_ids"),
        "top_p_token_offsets": batch.get("rollout_top_p_token_offsets"),
        # Miles pads to these lengths with --qkv-format bshd.
        "max_seq_lens": batch.get("max_seq_lens"),
    }
    given = {name: value for name, value in optional.items() if value is not None}
    renormalizes = "top_p_token_ids" in inspect.signature(score).parameters
    if renormalizes and args.rollout_top_p != 1 and not {"top_p_token_ids", "top_p_token_offsets"} <= given.keys():
        raise TrimtabError(
            f"--rollout-top-p is {args.rollout_top_p:g}, and the batch has no tokens that top-p kept, without which "
            "the log-probs are those of another policy: set it to 1"
        )
    result = score(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **given,
    )
    # Miles returns the values, slime an empty tensor before them.
    values = result[1] if isinstance(result, tuple) else result
    return values["log_probs"]


def _score_function() -> Callable[..., Any]:
    trainer = _trainer()
    return peer_module(hook(trainer).trainer, SCORING[trainer]).get_log_probs_and_entropy


def _check_whole(logps: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Raises `TrimtabError` if a response is split over ranks: sums over it would cover only a part."""
    if any(len(logp) != size for logp, size in zip(logps, lengths, strict=True)):
        raise TrimtabError(
            "context parallelism splits responses over ranks, which this adapter cannot join: turn it off"
        )


def _pad(values: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(values), batch_first=True)


def _flat(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([row[:size] for row, size in zip(values, lengths, strict=True)])
