"""Batched sampling with the trainer's own model, in this process.

`embedded_engine` splits a call into batches and decodes each batch, token by token, with one of three decoders:
`shared_prompt_decoder` for the Llama family, `invariant_decoder` for batch-invariant numerics, and `decoder` for all
other models (it also defines the interface). `sampling` draws the tokens, `weight_quantization` changes the weights.
"""
