"""Checkpoints: what is saved, how it is written, verified and restored.

run_state           the state of a run, saved and restored
store               files on the disk: atomic, verified, without pickle
state_tensors       modules, optimizers and random generators as named tensors and JSON
sharded_sections    tensors that are sharded over ranks
"""
