"""Inference servers (`vllm serve`, SGLang) as one engine.

`server_engine` turns responses into requests; `request_dispatch` sends them to all servers, with retry and failover;
`inference_server` checks each server and its weights; `http_client` is the connection. The routes are in
`vllm_protocol` and `sglang_protocol`; `server_protocol` defines their interface and rejects impossible results.
"""
