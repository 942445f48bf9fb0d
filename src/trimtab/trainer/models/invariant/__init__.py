"""Batch-invariant numerics: each token gets the same bits whatever else is in the batch.

`make_invariant` changes a transformers model of the Llama family so that products, norms, activations, attention and
head are computed by the modules of this package: classes are exchanged, parameters and names stay. Sampler and trainer
then run the same forward, so that log-probs of the same token under the same weights are bitwise equal: alone or in a
batch, padded or packed, in parallel or token by token from a cache, with or without gradient, on one thread or several.
Each file documents how its operation depends on the batch, and how that is avoided.
"""

from trimtab.trainer.models.invariant.apply import is_invariant, make_invariant

__all__ = ["is_invariant", "make_invariant"]
