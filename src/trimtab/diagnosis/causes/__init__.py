"""Names the causes of a mismatch from the log-probs of sampled tokens, with evidence.

Everything rests on three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the log-probs reported are those of the distribution really sampled, and pi covers no more
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0, h >= 0 mean a context's
                                           Renyi entropy of the tokens not sampled)
    noise moves logits   bfloat16, quantised weights and old weights shift logits up and down: the ratio keeps mean 1

`find.py` applies them in order: what pairs wrong tokens (`shifts`, `rows`, `jumps`) is repaired or set aside first,
then what is systematic (`contract`), then the size and origin of the noise that is left (`noise`, `drift`).
"""

from trimtab.diagnosis.causes.find import find_causes

__all__ = ["find_causes"]
