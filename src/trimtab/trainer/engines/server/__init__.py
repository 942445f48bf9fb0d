"""Inference servers (`vllm serve`, SGLang) as one engine."""
