"""Batched sampling with the trainer's own model, in this process.

`embedded_engine` splits a call into batches and decodes each, token by token, with one of three decoders:
`shared_prompt_decoder` for the Llama family, `invariant_decoder` for batch-invariant numerics, and `decoder`, which has
their interface, for all other models. `sampling` draws the tokens, `weight_quantization` changes the weights.
"""
