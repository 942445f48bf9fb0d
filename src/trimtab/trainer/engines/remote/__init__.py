"""An engine in another process, of this machine or behind Ray.

`remote_engine` forwards calls over a transport (`process_transport`, `cluster/ray_transport.py`) to an `engine_host`,
detects hangs and restarts. `hosted_turns` has the messages about turns.
"""
