"""Batch-invariant numerics: each token gets the same bits whatever else is in the batch.

A model of the Llama family, as transformers built it, is told to compute its products, norms, activations, attention
and head through the modules of this package (`use_in`): classes are exchanged, parameters and names stay. Sampler and
trainer then run one forward, so that log-probs of the same token under the same weights are equal to the last bit:
alone or in a batch, padded or packed, in parallel or one at a time from a cache, with gradient or without, on one
thread or several. What makes a batch visible, and what is done about it, each file says for its own operation.
"""

from trimtab.models.invariant.apply import is_invariant, use_in

__all__ = ["is_invariant", "use_in"]
