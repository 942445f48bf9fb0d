"""The numbers that decide what the diagnosis names, in one table.

`benchmarks/diagnosis_zoo.py` measures all of them together: how often each cause is found, and how often one is named
in data without it.
"""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """value: in the unit of `meaning`. calibrated: the data that it was set on."""

    value: float
    meaning: str
    calibrated: str = "chosen, then tried in the zoo"


TABLE: dict[str, Threshold] = {
    # Values that are no log-probs.
    "impossible": Threshold(-50.0, "nats: a whole number at most this large was not sampled", "p = 2e-22"),
    "placeholder-tokens": Threshold(3, "fewest tokens that contradict a constant"),
    "placeholder-apart": Threshold(0.25, "share of contradicted tokens for which a whole place is left out"),
    "placeholder-last": Threshold(20, "times as frequent at the last token as elsewhere, where the other side is far"),
    "placeholder-chance": Threshold(
        9.2, "nats: a constant is contradicted so much more often than values near 0", "1e-4"
    ),
    "certain-tokens": Threshold(50, "fewest tokens within 1e-3 of 0 that are compared with those at 0"),
    "padding-run": Threshold(2, "fewest 0.0 on both sides at the end of a padded response"),
    "padding-responses": Threshold(4, "fewest responses of one length that can be padded"),
    "padding-share": Threshold(0.2, "share of responses that end so"),
    "padding-bias": Threshold(0.05, "of k3, that certain last tokens taken for padding may cause", "computed"),
    # The contract: the mean ratio of tokens that were drawn from the reported distribution is 1.
    "contract-z": Threshold(5.0, "standard errors from 1"),
    "contract-bet": Threshold(9.2, "nats won by betting on a mean above 1", "Ville's inequality: 1e-4"),
    "contract-close": Threshold(0.001, "a mean this close to 1 is always accepted"),
    "contract-silent": Threshold(0.2, "standard error of the mean ratio beyond which it says nothing"),
    # Repairs and confidence.
    "heals": Threshold(0.9, "part of k3 that a repair may leave"),
    "confidence-outside": Threshold(0.45, "plus half the squared share of k3, where something stays open"),
    "confidence-above-zero": Threshold(0.9, "confidence of unexplained where values are above 0"),
    "confidence-unexplained": Threshold(0.65, "confidence of unexplained", "share right in the zoo"),
    # Groups of tokens.
    "group-tokens": Threshold(40, "fewest undecided tokens of a group that is compared"),
    "prompts": Threshold(8, "fewest prompts with so many tokens that are compared"),
    "prompt-tokens": Threshold(20, "the same of a prompt, of which there are many"),
    "group-part": Threshold(0.05, "smallest part of the tokens of a group that is pointed at"),
    "group-lift": Threshold(2.0, "times its part of the tokens, that its part of k3 is"),
    "growth-z": Threshold(5.0, "standard errors of a growth of the mean log size"),
    "age-growth": Threshold(1.15, "of sizes, from the youngest weights to older ones"),
    "step-growth": Threshold(1.8, "of sizes, from the step with the smallest to the one with the largest"),
    "step-growth-z": Threshold(6.0, "standard errors of that growth, of which the largest is chosen"),
    "cache-growth": Threshold(1.3, "of sizes, from prompts that are new to those that were asked before"),
    # Values of another meaning.
    "log-base-error": Threshold(0.03, "of the log of the median ratio of the two log-probs"),
    "log-base-spread": Threshold(0.3, "median deviation of that log"),
    "log-base-left": Threshold(0.5, "part of the mean |log-ratio| that the conversion may leave"),
    "wrong-token-noise": Threshold(0.02, "nats: least size of noise"),
    "wrong-token-most-noise": Threshold(0.5, "nats: most noise in which the most likely token is told from others"),
    "wrong-token-far": Threshold(20, "fewest tokens that are not the most likely one"),
    "wrong-token-above": Threshold(0.05, "most tokens far above the sampler's, relative to those far below"),
    "wrong-token-unlikely": Threshold(-2.5, "nats, which a most likely token is seldom below", "bases: 12% of them"),
    "wrong-token-impossible": Threshold(0.1, "most far tokens of impossible probabilities; of unlikely ones, half"),
    "wrong-token-surprising": Threshold(3.0, "times as many far tokens where the most likely one is almost certain"),
    "wrong-token-between": Threshold(2.5, "share between noise and far, relative to the far ones", "temperature: 1.9"),
    "wrong-token-least-missed": Threshold(0.3, "far tokens over those that were not the most likely", "other ids: .18"),
    "wrong-token-most-missed": Threshold(2.0, "the same at most", "responses of 11 tokens: 1.5"),
    "temperature-explains": Threshold(0.08, "least share of the variance of shifts on the line of two temperatures"),
    "greedy-least": Threshold(-3.0, "nats, which hardly any most likely token is below"),
    "greedy-unlikely": Threshold(0.02, "most tokens below that in greedy decoding"),
    "truncated-far": Threshold(0.002, "share of ratios below 1/e that truncation may have"),
    "truncated-moved": Threshold(0.05, "plus this part of the tokens that moved down"),
    "temperature-likelihood": Threshold(6.0, "nats by which one of two distributions must explain the tokens better"),
    "truncated-mass": Threshold(0.65, "least kept mass that top-p and top-k are sure to explain"),
    # Tokens of another place.
    "swapped-own-distance": Threshold(0.3, "nats between a response's two lists from which on it disagrees"),
    "swapped-distance": Threshold(0.25, "of a list's own and the second-best distance, that the right one has"),
    "swapped-responses": Threshold(4, "fewest responses with another one's list"),
    "swapped-share": Threshold(0.25, "least share of them among those that disagree"),
    "swapped-fit": Threshold(3.0, "times the usual distance that a response with the right list may have"),
    "swapped-equal": Threshold(0.05, "share of agreeing responses with equal lists, from which on copies say nothing"),
    "swapped-surprise": Threshold(3.0, "nats of surprise that a response needs to be told from others"),
    # Old weights.
    "undelivered-order": Threshold(0.8, "rank correlation of steps and the size of their noise", "4 of 24 orders of 4"),
    "reward-correlation": Threshold(0.15, "of log-ratio and advantage of responses"),
    "reward-correlation-z": Threshold(5.0, "standard errors of that correlation"),
    "reward-correlation-strong": Threshold(0.3, "the same where versions say age 0, or noise is coarse"),
    "reward-correlation-strong-z": Threshold(3.5, "standard errors where noise is coarse"),
    "drift-coarseness": Threshold(-0.8, "largest coarseness of noise that depends on token ids and is called drift"),
    # Depth in the context.
    "depth-span": Threshold(1024, "smallest difference in depth, in tokens: over less, the form of an answer decides"),
    "depth-tokens": Threshold(500, "fewest undecided tokens"),
    "depth-responses": Threshold(20, "fewest responses that span so much"),
    "depth-growth": Threshold(2.0, "of sizes, from the shallowest fifth to the deepest", "texts differ by up to 2"),
    "depth-growth-low": Threshold(1.5, "the lower end of its interval"),
    "depth-z": Threshold(6.0, "standard errors of the trend"),
    "depth-base": Threshold(0.35, "of the deepest sizes, that is there at depth 0 and counts as part of the growth"),
    # Noise.
    "least-rms": Threshold(4e-4, "logits: two float32 forwards, or the rounding of the file, move less"),
    "least-k3": Threshold(1e-8, "k3 of two float32 forwards"),
    "noise-k3": Threshold(0.6, "largest k3 that is called noise", "4 bits in exact streams: .1"),
    "direction": Threshold(0.35, "of the variance of shifts, that probability decides", "8 bits, trained: .3; T: .5"),
    "uneven": Threshold(0.2, "of the variance of log sizes, that a group decides", "8 bits, trained: .08, bases: .02"),
    "prompt-repeats": Threshold(0.1, "the same by prompt, where it is the cause"),
    "noise-tokens": Threshold(200, "undecided tokens below which the kind of noise is a guess"),
    "confidence-few": Threshold(0.65, "confidence of noise in fewer"),
    "one-noise-share": Threshold(0.008, "of tokens beyond five usual shifts in one noise", "tails of 12 bases"),
    "one-noise-tokens": Threshold(5, "fewest tokens beyond five usual shifts that count"),
    "leftover-share": Threshold(0.03, "the same after a repair, which leaves some wrong pairs"),
    "one-noise-k3": Threshold(0.3, "of k3 in these tokens", "tails of 12 bases"),
    "coarse-noise-k3": Threshold(0.5, "the same for noise of quantized weights", "SmolLM2, 8 bits: .32"),
    "routing-share": Threshold(0.15, "most tokens beyond five usual shifts that other experts explain"),
    "routing-k3": Threshold(0.5, "least share of k3 in them", "a mixture of experts, bfloat16: .9"),
    "confidence-routing": Threshold(0.85, "confidence of routing"),
    "id-tokens": Threshold(1500, "fewest undecided tokens in which the part that depends on their ids shows"),
    "eight-bits-rms": Threshold(0.08, "logits: eight bits move as far, bfloat16 may as well", "SmolLM2: .12, .07"),
    "confidence-eight-bits": Threshold(0.65, "confidence of precision there, without token ids"),
}
THRESHOLDS = {name: row.value for name, row in TABLE.items()}
