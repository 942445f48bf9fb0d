"""Runs foreign code: user functions in processes with limits, Python code written by a model in a sandbox.

- Functions (rewards): `function_pool.py` runs each call in a worker process.
- Python code: `python_pool.py`, with the limits and results of `code_result.py`, in one of two sandboxes:
  - Monty: `monty.py`, and its worker process in `monty_worker.py`.
  - bubblewrap: `bubblewrap.py`. `container_starter.py` starts containers with the command of `container_command.py` and
    the filters of `seccomp.py`; each container runs `container_init.py`.
"""
