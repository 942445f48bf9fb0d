"""Inference servers (`vllm serve`, SGLang) as one engine.

`server_engine` makes requests of responses; `request_dispatch` sends them to all servers, with retry and failover;
`server_pool` checks each server and its weights; `http_client` is the connection. The routes are in `vllm_protocol` and
`sglang_protocol`; `server_protocol` has their interface, and checks of what a server can have sampled.
"""
