"""Objectives inside other trainers, and in their configuration.

One module for each trainer, which its users import: `trl`, `verl` (a plugin), `prime_rl`, `skyrl`, `nemo_rl`, `slime`
(Miles too), `areal`, `openrlhf`, `tinker`. They share

hooks           what each trainer's hook passes, which objectives it can carry, and which settings beside them
micro_batch     the loss of a micro-batch, its metrics, and tokens that the sampler did not score
recording       log-probs as JSON lines for `trimtab diagnose`, and for a `trimtab.Monitor`
config_lines    an objective as configuration of each trainer: its own settings, or the lines of its adapter

trl_async, trl_packed and trl_shared belong to `trl`; verl_driver, verl_loss and verl_records to `verl`.

To add a trainer:

1. a module that reads its batch into `PolicyLogps` and calls `micro_batch.evaluate`, with `dump` and `monitor`
2. a row of `hooks.HOOKS`: the fields that it passes
3. rows of loss_settings.csv: settings of its own loss that have no effect beside an objective
4. the lines that users write, in config_lines/adapter_lines.py
5. a call in tests/support/adapter_calls.py, which several suites run, and a section of docs/reference-adapters.md
"""
