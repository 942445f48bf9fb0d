"""Models: loading, log-probs and entropy in bounded memory, perturbation, routing, and the laboratory model.

- `load`: a policy from a folder, a hub id, or the two that come with Trimtab (`bundled`, `laboratory`).
- `logprobs`: the log-probs of a micro-batch. Its attention is in `packed_attention`, its head in `fused_head`, its
  products in `matmul`; `architecture` knows the parts of each family; `invariant` has batch-invariant numerics.
- `perturbation`, `noise`: ALP. `routing`: experts recorded and replayed.
- `sharding`: FSDP2, and whole weights under their names without adapters.
"""
