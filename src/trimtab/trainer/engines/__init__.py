"""Inference engines behind one protocol (`types.Engine`): in this process, in another one, vLLM, and servers."""
