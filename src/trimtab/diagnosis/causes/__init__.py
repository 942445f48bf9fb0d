"""Infers the causes of a mismatch from the log-probs of sampled tokens, with evidence.

The rules follow from three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the reported log-probs are of the sampling distribution and pi has no larger support
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0; h >= 0 is a Renyi entropy
                                           of the context's tokens that were not sampled)
    noise moves logits   bfloat16, quantized weights and old weights shift logits up and down: the ratio keeps mean 1

A cause is named only if undoing it reduces the mismatch. A detector proposes a repair of the tokens: converted values,
lists shifted back, or tokens left out. Each stage keeps the repair that leaves the least mismatch, and the next stage
searches the repaired tokens. What remains is noise (`precision`, `quantized`, `routing`) if the first fact holds, and
`unexplained` otherwise.

  search           the stages of the search
  detector         inputs and results of detectors, and shared statistics
  wrong_values     placeholder, non-finite, log-base, wrong-token, copied
  wrong_pairs      misaligned, retokenized
  sampling_faults  temperature, truncated-sampling, raw-logprobs
  old_weights      stale-cache, undelivered, stale
  noise_kinds      precision, quantized, routing, unexplained
  candidates       possible causes of a difference that nothing proves, by signs in its tokens (candidates.toml)

To add a detector, write a function of tokens and context in one of these files, and add it to `search.STAGES` and a row
to causes.toml. Most thresholds stand above the detector that uses them; docs/reference-detection.md lists all. Brackets
after a threshold are measured values: of a model, of weights of 4 or 8 bits, of the unchanged streams of 12 models
(bases), or with a planted fault (zoo, by `benchmarks/diagnosis_zoo.py`).
"""

from trimtab.diagnosis.causes.candidates import find_candidates
from trimtab.diagnosis.causes.search import find_causes

__all__ = ["find_candidates", "find_causes"]
