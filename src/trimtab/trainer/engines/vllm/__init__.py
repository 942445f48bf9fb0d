"""vLLM in this process.

`vllm_engine` is the engine; `stepped_runner` starts and steps vLLM; `worker_extension` loads weights in its workers.
"""
