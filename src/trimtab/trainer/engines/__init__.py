"""Inference engines behind one protocol (`types.Engine`).

- `factory`: builds the engines of a run from its recipe.
- `embedded`: samples with the trainer's own model; `vllm`: with vLLM; `server`: on running inference servers.
- `remote`: runs an embedded or vLLM engine in another process, behind a transport.

All engines share these modules: `request` validates requests, `decoding_rows` holds a call with its responses,
`stopping` detects the end of a response, `turn_exchange` applies results of turns, `weight_transfer` shares weights.
"""
