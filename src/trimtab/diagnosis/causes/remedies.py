"""What to do about each cause, in a sentence or two; docs/causes.md has the options of each trainer."""

from __future__ import annotations

REMEDIES = {
    "placeholder": (
        "A constant was written where no log-prob was known. Give these tokens a loss mask of 0 (tool output, an end "
        "token that was appended, padding), or write the log-probs of the sampled tokens (vLLM: logprobs=0, SGLang: "
        "return_logprob)."
    ),
    "non-finite": (
        "An infinite log-prob is a token outside the kept set of top-k, top-p or a vocabulary mask; NaN is an "
        "overflow, or a value that was not written (null in JSON). Score sampled tokens with the same masks, compute "
        "the log-softmax in float32, and log a value for every sampled token."
    ),
    "misaligned": (
        "Pair each sampled token with its own log-prob: logits at position t predict token t + 1, both lists start at "
        "the first response token, and responses are joined by an id, not by their order after sorting or packing."
    ),
    "retokenized": (
        "Train on the token ids that the sampler returned: append new tokens to the old ids and take the loss mask "
        "from them. Never decode and encode a conversation again between turns."
    ),
    "log-base": "Take natural logarithms on both sides: multiply by ln 2 = 0.6931 or ln 10 = 2.3026.",
    "wrong-token": (
        "Take the log-prob of the token that was sampled, not the first of the list of most likely ones (vLLM: "
        "logprobs[position][token_id])."
    ),
    "copied": (
        "Write the log-probs that the trainer computes itself (verl: rollout_correction.bypass_mode=False for a step), "
        "then run diagnose again: this data says nothing about the mismatch."
    ),
    "temperature": (
        "Divide the trainer's logits by the sampling temperature before the log-softmax, and have the sampler return "
        "log-probs after temperature (vLLM: logprobs_mode=processed_logprobs)."
    ),
    "raw-logprobs": (
        "Have the sampler return the log-probs of the distribution it samples from (vLLM: "
        "logprobs_mode=processed_logprobs), not those of the model before temperature and truncation."
    ),
    "truncated-sampling": (
        "Sample with top_p = 1, top_k = 0 and min_p = 0, or record the kept token ids and renormalize the trainer's "
        "distribution over them."
    ),
    "undelivered": (
        "Compare the sampler's weights with the trainer's after a publication (a checksum of each tensor, or the "
        "log-probs of one fixed text on both sides); with LoRA, whether the adapter's name and version change with "
        "each one."
    ),
    "stale": (
        "Refresh the sampler's weights more often or bound the lag (max_lag); otherwise correct with weights of "
        "proximal over behavior and log versions to separate lag from rounding."
    ),
    "stale-cache": (
        "Empty the engine's prefix cache with every publication of weights (vLLM: reset_prefix_cache, SGLang: "
        "flush_cache), also where requests are paused over it, or turn prefix caching off to compare."
    ),
    "routing": (
        "Replay the sampler's routing in the trainer (vLLM and SGLang return the experts of each token), or mask "
        "tokens beyond bounds on the ratio; dense models have no experts: then look at these tokens."
    ),
    "quantized": (
        "Sample with unquantized weights and KV cache, or correct with token weights and a sequence or geometric mask; "
        "rare tokens are hit hardest."
    ),
    "precision": (
        "Usually harmless: any correction with bounds near 1 absorbs it. Run both sides in one dtype (float16 or "
        "float32 logits) to shrink it."
    ),
    "long-context": (
        'Compute attention alike on both sides: the same kernel or invariant numerics (numerics = "invariant" in '
        "Trimtab), rotary angles and positions in float32 with the same rope scaling, and no other split of long "
        "sequences (context parallelism, chunked prefill) than the sampler's. Until then, a mask that bounds the ratio "
        "of each token keeps the deepest ones out."
    ),
    "unexplained": (
        "Look for it before you choose a correction: check that both columns hold natural logarithms of probabilities, "
        "score one response of this data again with the trainer and with the engine, and compare token by token (the "
        "same ids, weights and template)."
    ),
}
