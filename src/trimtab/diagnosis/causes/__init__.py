"""Infers the causes of a mismatch from the log-probs of sampled tokens, with evidence.

The rules follow from three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the reported log-probs are those of the sampling distribution and pi has no larger support
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0; h >= 0 is a Renyi entropy
                                           of the context's tokens that were not sampled)
    noise moves logits   bfloat16, quantized weights and old weights shift logits up and down: the ratio keeps mean 1

A cause is named only if undoing it leaves less of the mismatch. Each detector proposes repairs that are applied to the
tokens: values converted, lists shifted back, tokens left out. Stage by stage the one that leaves least is kept, and the
search goes on with what is left, until noise remains (`precision`, `quantized`, `routing`), which needs the first fact
to hold. What no detector explains is `unexplained`.

  search           the stages, and what is found in them
  detector         what a detector receives and returns, and the statistics that they share
  wrong_values     placeholder, non-finite, log-base, wrong-token, copied
  wrong_pairs      misaligned, retokenized
  sampling_faults  temperature, truncated-sampling, raw-logprobs
  old_weights      stale-cache, undelivered, stale
  noise_kinds      precision, quantized, routing, unexplained
  candidates       what a difference may be that nothing proves, by the signs that its tokens show (candidates.toml)

Another detector is a function of tokens and context in one of these files, entered in `search.STAGES`, and a row of
causes.toml. Most numbers that decide stand above the detector that uses them, and all of them in
docs/reference-detection.md. Brackets behind a number are values that were measured, for a model, for weights of 4 or 8
bits, for the untouched streams of 12 models (bases), or with a planted fault (zoo, by `benchmarks/diagnosis_zoo.py`).
"""

from trimtab.diagnosis.causes.candidates import find_candidates
from trimtab.diagnosis.causes.search import find_causes

__all__ = ["find_candidates", "find_causes"]
