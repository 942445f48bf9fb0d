"""Inference engines behind one protocol (`types.Engine`): in this process, in another one, vLLM, and servers.

- `factory`: the engines of a run, from its recipe.
- `embedded`: batched sampling with the trainer's own model; `vllm`: with vLLM; `server`: on running servers.
- `remote`: an embedded or vLLM engine in another process, behind a transport.

What all of them share: `request` checks what they are asked for, `decoding_rows` holds responses while they are
sampled and joins the results of turns, `stopping` says where one ends, `weight_transfer` checks and shares new weights.
"""
