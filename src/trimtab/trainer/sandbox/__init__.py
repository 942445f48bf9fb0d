"""Runs code that is not ours: functions in processes with limits, Python text of a model in a sandbox.

- Functions (rewards): `function_pool.py`, each call in a worker process.
- Python text: `python_pool.py`, with limits and results of `code_result.py`, in one of two sandboxes:
  - Monty: `monty.py`, and the process in `monty_worker.py`.
  - bubblewrap: `bubblewrap.py`; a container is started by `container_starter.py` with the filters of `seccomp.py`,
    and runs `container_init.py`.
"""
