"""Trimtab's objectives and monitor inside other trainers, and objectives written as configuration of these trainers.

Users import the module of their trainer: `trl`, `verl` (a plugin), `prime_rl`, `skyrl`, `nemo_rl`, `slime` (also for
Miles), `areal`, `openrlhf`, `tinker`. These modules share

hooks           for each trainer: the fields that its loss hook passes, and the objectives that it accepts
loss_settings   settings of the trainer's own loss: taken over by an objective, or refused
micro_batch     the loss and the metrics of a micro-batch; tokens for which the sampler reported no log-prob
recording       writes log-probs as JSON lines for `trimtab diagnose`, and shows them to a `trimtab.Monitor`
config_lines    renders an objective as configuration: the trainer's own settings, or the lines of its adapter

trl_async, trl_packed and trl_shared belong to `trl`; verl_driver, verl_loss and verl_records to `verl`.

To add a trainer:

1. a module that reads its batch into `PolicyLogps` and calls `micro_batch.evaluate`, with `dump` and `monitor`
2. a row of `hooks.HOOKS`: the fields that the trainer's hook passes
3. rows of loss_settings.csv
4. the lines that users write, in config_lines/adapter_lines.py
5. a call in tests/support/adapter_calls.py, which several suites run, and a section of docs/reference-adapters.md
"""
