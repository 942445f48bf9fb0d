"""An engine in another process, on this machine or in a Ray actor.

`remote_engine` forwards calls over a transport (`process_transport`, `cluster/ray_transport.py`) to an `engine_host`,
detects hangs and restarts the process. `hosted_turns` defines the messages about turns.
"""
