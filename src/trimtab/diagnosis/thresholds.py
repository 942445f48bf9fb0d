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


# One threshold a line, however long.
# fmt: off
TABLE: dict[str, Threshold] = {
    # Constants in place of log-probs.
    "impossible": Threshold(-50.0, "nats: a whole number at most this large was not sampled", "p = 2e-22"),
    "placeholder-tokens": Threshold(3, "fewest tokens that contradict a constant"),
    "placeholder-apart": Threshold(0.25, "share of contradicted tokens for which a whole place is left out"),
    "placeholder-last": Threshold(20, "times as often at the last token as elsewhere, where the other side is far from it"),
    "placeholder-chance": Threshold(9.2, "log of the chance by which a constant is contradicted as often as values near 0", "1e-4"),
    "certain-tokens": Threshold(50, "fewest tokens within 1e-3 of 0 that are compared with those at 0"),
    "padding-run": Threshold(2, "fewest 0.0 on both sides at the end of a padded response"),
    "padding-responses": Threshold(4, "fewest responses of one length that can be padded"),
    "padding-share": Threshold(0.2, "least share of responses that end with such padding"),
    "padding-bias": Threshold(0.05, "share of k3 that certain last tokens, taken for padding, may cause", "computed"),
    # The contract: the mean ratio of tokens that were drawn from the reported distribution is 1.
    "contract-z": Threshold(5.0, "standard errors of the mean ratio from 1 beyond which it is wrong"),
    "contract-bet": Threshold(9.2, "log of the e-value against a mean of 1 beyond which the mean is above 1", "Ville's inequality: 1e-4"),
    "contract-close": Threshold(0.001, "a mean this close to 1 is always accepted"),
    "contract-silent": Threshold(0.2, "standard error beyond which the mean ratio says nothing"),
    # Repairs and confidence.
    "heals": Threshold(0.9, "part of k3 that a repair may leave"),
    "confidence-outside": Threshold(0.45, "confidence where the mean ratio stays wrong, plus half the squared share of k3 that was removed"),
    "confidence-above-zero": Threshold(0.9, "confidence of unexplained where values are above 0"),
    "confidence-unexplained": Threshold(0.65, "confidence of unexplained", "share right in the zoo"),
    # Groups of tokens.
    "group-tokens": Threshold(40, "fewest undecided tokens of a group that is compared"),
    "groups": Threshold(2, "fewest groups with so many tokens that are compared"),
    "prompts": Threshold(8, "fewest prompts with so many tokens that are compared"),
    "prompt-tokens": Threshold(20, "fewest undecided tokens of a prompt that is compared"),
    "group-part": Threshold(0.05, "smallest share of the tokens that a group pointed out may have"),
    "group-lift": Threshold(2.0, "least ratio of a group's share of k3 to its share of the tokens"),
    "growth-z": Threshold(5.0, "standard errors of a growth of the mean log size of the noise"),
    "age-growth": Threshold(1.15, "least growth of the size of the noise from the youngest weights to older ones"),
    "step-growth": Threshold(1.8, "least growth of the size of the noise from the step with the smallest to the one with the largest"),
    "step-growth-noise": Threshold(3.0, "growth from step to step above which a mismatch is not called noise", "4 bits, in training: 2.3"),
    "step-growth-z": Threshold(6.0, "standard errors of the growth from the smallest step to the largest, which are selected"),
    "cache-growth": Threshold(1.3, "least growth of the noise from prompts that are new to those that were asked before"),
    # Values of another meaning.
    "log-base-error": Threshold(0.03, "largest error of the log of the median ratio of the two log-probs"),
    "log-base-spread": Threshold(0.3, "largest median deviation of the log of that ratio"),
    "log-base-left": Threshold(0.5, "share of the mean |log-ratio| that the conversion may leave"),
    "wrong-token-noise": Threshold(0.02, "nats: least size of noise"),
    "wrong-token-most-noise": Threshold(0.5, "nats: most noise in which the most likely token is told from others"),
    "wrong-token-far": Threshold(20, "fewest tokens that are not the most likely one"),
    "wrong-token-above": Threshold(0.05, "most tokens far above the sampler's log-prob, relative to those far below"),
    "wrong-token-unlikely": Threshold(-2.5, "nats below which a most likely token is seldom", "bases: 12% of them"),
    "wrong-token-impossible": Threshold(0.1, "largest share of far tokens whose probabilities are impossible; of unlikely ones, half"),
    "wrong-token-surprising": Threshold(3.0, "times as many far tokens where the most likely one is almost certain"),
    "wrong-token-between": Threshold(2.5, "largest ratio of tokens between noise and far to far ones", "temperature: 1.9"),
    "wrong-token-least-missed": Threshold(0.3, "least ratio of far tokens to those that were not the most likely", "other ids: .18"),
    "wrong-token-most-missed": Threshold(2.0, "largest ratio of far tokens to those that were not the most likely", "responses of 11 tokens: 1.5"),
    "temperature-explains": Threshold(0.08, "least share of the variance of shifts on the line of two temperatures"),
    "truncated-far": Threshold(0.002, "share of ratios below 1/e that truncation may have"),
    "truncated-moved": Threshold(0.05, "plus this part of the tokens that moved down"),
    "temperature-likelihood": Threshold(6.0, "nats by which one of two distributions must explain the tokens better"),
    "truncated-mass": Threshold(0.65, "least kept mass that top-p and top-k are sure to explain"),
    # Tokens of another place.
    "swapped-own-distance": Threshold(0.3, "nats between a response's two lists from which on it disagrees"),
    "swapped-distance": Threshold(0.25, "largest distance of the right list, relative to the response's present one and the second best"),
    "swapped-responses": Threshold(4, "fewest responses that have another one's list"),
    "swapped-share": Threshold(0.25, "least share of them among the responses that disagree"),
    "swapped-fit": Threshold(3.0, "times the usual distance that a response with the right list may have"),
    "swapped-equal": Threshold(0.05, "share of agreeing responses with equal lists above which equal lists say nothing"),
    "swapped-surprise": Threshold(3.0, "nats of surprise that a response needs to be told from others"),
    # Old weights.
    "undelivered-order": Threshold(0.8, "rank correlation of steps and the size of their noise", "4 of 24 orders of 4"),
    "reward-correlation": Threshold(0.15, "least correlation of log-ratio and advantage of responses"),
    "reward-correlation-z": Threshold(5.0, "standard errors of that correlation"),
    "reward-correlation-strong": Threshold(0.3, "least correlation where the versions say age 0, or the noise is coarse"),
    "reward-correlation-strong-z": Threshold(3.5, "standard errors of a strong correlation"),
    "drift-coarseness": Threshold(-0.8, "largest coarseness of noise that depends on token ids and is called drift"),
    # Shifted lists.
    "shift-fit-single": Threshold(0.25, "part of its distance that the offset of a single response may leave"),
    "shift-gain-single": Threshold(6.0, "nats that the offset of a single response must gain"),
    "shift-stretch-gain": Threshold(3.0, "nats that a stretch must gain"),
    "shift-lead": Threshold(3.0, "least ratio of the gain to that of the other offsets"),
    "shift-gain": Threshold(12.0, "nats that all stretches of an offset must gain"),
    "shift-fit": Threshold(0.65, "part of the distance that an offset may leave"),
    "shift-correlation": Threshold(0.75, "least correlation of the shifted lists"),
    "shift-part": Threshold(0.22, "least part of all distance that an offset must gain"),
    "shift-whole-z": Threshold(6.0, "standard errors of the mean gain where no stretch is long enough"),
    "shift-surprise": Threshold(2.0, "nats of surprise that a response needs to show its shift"),
    "shift-other": Threshold(0.15, "share of the gain of all offsets that others may have before responses are decided one by one"),
    # Jumps where turns meet.
    "jump-scales": Threshold(25.0, "usual sizes beyond which a token jumps"),
    "jump-log-ratio": Threshold(1.5, "nats that it jumps at least"),
    "jump-tail-scales": Threshold(8.0, "usual sizes from which on a token belongs to a tail"),
    "jump-gap": Threshold(0.35, "fewest jumps for each token of that tail: a heavy tail has fewer"),
    "jump-boundary-scales": Threshold(6.0, "usual sizes of a jump where a turn begins"),
    "jump-rate": Threshold(5.0, "times as many jumps at turn boundaries as elsewhere"),
    "jump-least-scale": Threshold(0.03, "nats: least usual size"),
    "jump-most": Threshold(0.15, "most tokens that jump: more are not an exception"),
    # Shifts that begin with a turn.
    "turn-lead": Threshold(12.0, "nats that shifts from a turn on must gain more than shifts of whole responses"),
    "turn-reached": Threshold(0.85, "part of the gain from the best position anywhere"),
    # Raw log-probs that the ratio does not show.
    "raw-k3": Threshold(0.02, "largest k3 for which entropies are compared"),
    "raw-surprise": Threshold(0.004, "nats by which tokens are more surprising than their entropy, at least"),
    "raw-z": Threshold(6.0, "standard errors of the mean excess surprise"),
    "raw-exponent": Threshold(1.1, "exponent up to which the entropy column is that of the reported log-probs"),
    "raw-second-order": Threshold(0.34, "coefficient of the KL divergence of two temperatures", "computed"),
    # Temperature and truncation.
    "temperature-z": Threshold(6.0, "standard errors of the slope on a line with little spread"),
    "temperature-z-wide": Threshold(8.0, "standard errors of the slope on a line with much spread"),
    "temperature-spread-coarse": Threshold(2.0, "largest residual per unit of slope where it exceeds `temperature-residual` logits"),
    "temperature-spread": Threshold(6.0, "largest residual, in logits per unit of slope"),
    "temperature-tight": Threshold(2.5, "residual per unit of slope of a tight line"),
    "temperature-slope": Threshold(0.02, "least slope of the line of two temperatures"),
    "temperature-residual": Threshold(1.0, "residual in logits above which noise flattens the line unevenly", "SmolLM2: 1.9"),
    "truncated-z": Threshold(6.0, "standard errors of the kept mass below 1"),
    "truncated-deficit": Threshold(0.001, "least mass that truncation must cut"),
    "truncated-bulk-z": Threshold(4.0, "standard errors of the deficit without outliers"),
    "truncated-uneven": Threshold(4.0, "largest ratio of the mean log-ratio to the log of the kept mass"),
    "truncated-proportional": Threshold(0.8, "largest correlation of log-ratio and log-prob", "zoo: .6; log-base .94"),
    "truncated-up": Threshold(0.6, "most tokens that move up for each that moves down"),
    "raw-likelihood": Threshold(2.0, "nats by which the trainer must explain the tokens better"),
    # The border between 16-bit arithmetic and quantized weights.
    "border-rms": Threshold(0.25, "logits between 16 bits and quantized weights", "whole runs: .18-.23, .38-.44"),
    "border-k3": Threshold(0.0058, "k3 between 16 bits and quantized weights", "whole runs: 1.3e-3 to 2.9e-3, 5.7e-3 to 1.2e-2"),
    "border-rms-weight": Threshold(0.7, "weight of the rms, which varies less between runs than k3"),
    "border-ids": Threshold(0.7, "distance from the border that is added where noise depends on token ids"),
    "ids-part": Threshold(0.07, "least part of the variance that token ids explain", "8 bits: .12, bfloat16: .02"),
    "ids-least": Threshold(60, "fewest ids that occur twice"),
    "confidence-by-size": Threshold(0.65, "confidence where only the size is known: weights a little old move logits as far"),
    "confidence-by-recipe": Threshold(0.95, "confidence where the run's recipe says it"),
    "recipe-rms": Threshold(1.3, "logits: the largest rms measured for float32 against bfloat16, after an update"),
    "bfloat16-rms": Threshold(0.008, "logits: an rms below is float16 or tf32 rather than bfloat16"),
    # Depth in the context.
    "depth-span": Threshold(1024, "smallest difference in depth, in tokens: over less, the form of an answer decides"),
    "depth-tokens": Threshold(500, "fewest undecided tokens"),
    "depth-responses": Threshold(20, "fewest responses that span so much"),
    "depth-growth": Threshold(2.0, "least growth of the size of the noise from the shallowest fifth of depths to the deepest", "texts differ by up to 2"),
    "depth-growth-low": Threshold(1.5, "least lower end of the interval of that growth"),
    "depth-z": Threshold(6.0, "standard errors of the trend over depth"),
    "depth-base": Threshold(0.35, "share of the deepest sizes that may be there at depth 0 and counts as part of the growth"),
    # Noise.
    "least-rms": Threshold(4e-4, "logits: two float32 forwards, or the rounding of the file, move less"),
    "least-k3": Threshold(1e-8, "k3 of two float32 forwards"),
    "noise-k3": Threshold(0.6, "largest k3 that is called noise", "4 bits in exact streams: .1"),
    "direction": Threshold(0.35, "largest share of the variance of shifts that the token's probability decides", "8 bits, trained: .3; T: .5"),
    "uneven": Threshold(0.2, "largest share of the variance of log sizes that a group decides", "8 bits, trained: .08, bases: .02"),
    "prompt-repeats": Threshold(0.2, "least share of the variance of log sizes that the prompt decides, where it is the cause", "4 bits, laboratory: .18"),
    "prompt-worst": Threshold(0.33, "largest share of the prompts that may hold 80% of k3 where the prompt is the cause", "4 bits, laboratory: .37"),
    "noise-tokens": Threshold(200, "undecided tokens below which the kind of noise is a guess"),
    "confidence-few": Threshold(0.65, "confidence of noise in fewer tokens than that"),
    "one-noise-share": Threshold(0.008, "largest share of tokens beyond five usual shifts in noise of one size", "tails of 12 bases"),
    "one-noise-tokens": Threshold(5, "fewest tokens beyond five usual shifts that count"),
    "leftover-share": Threshold(0.03, "share of tokens beyond five usual shifts after a repair, which leaves some wrong pairs"),
    "one-noise-k3": Threshold(0.3, "largest share of k3 in tokens beyond five usual shifts, for noise of one size", "tails of 12 bases"),
    "coarse-noise-k3": Threshold(0.5, "share of k3 in tokens beyond five usual shifts, for noise of quantized weights", "SmolLM2, 8 bits: .32"),
    "routing-share": Threshold(0.15, "largest share of tokens beyond five usual shifts that other experts explain"),
    "routing-k3": Threshold(0.5, "least share of k3 in tokens beyond five usual shifts that is called routing", "a mixture of experts, bfloat16: .9"),
    "confidence-routing": Threshold(0.85, "confidence of routing"),
    "id-tokens": Threshold(1500, "fewest undecided tokens in which the part that depends on their ids shows"),
    "eight-bits-rms": Threshold(0.08, "logits: eight bits move as far, bfloat16 may as well", "SmolLM2: .12, .07"),
    "confidence-eight-bits": Threshold(0.65, "confidence of precision there, without token ids"),
}
# fmt: on
THRESHOLDS = {name: row.value for name, row in TABLE.items()}
