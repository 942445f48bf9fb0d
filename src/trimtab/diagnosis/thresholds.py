"""The numbers that decide what the diagnosis names, in one table.

calibrated: the data that a value was set on. false_alarms: how often it fires on data without the fault, where that is
known of it alone. `benchmarks/diagnosis_zoo.py` measures all of them together.
"""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """value: in the unit of `meaning`."""

    value: float
    meaning: str
    calibrated: str
    false_alarms: str


_CHOSEN = "chosen, then tried in the zoo"
_UNKNOWN = "not measured alone"
TABLE: dict[str, Threshold] = {
    # Values that are no log-probs.
    "impossible": Threshold(-50.0, "nats: a whole number at most this large was not sampled", "p = 2e-22", _UNKNOWN),
    "placeholder-tokens": Threshold(3, "fewest tokens that contradict a constant", _CHOSEN, _UNKNOWN),
    "placeholder-apart": Threshold(
        0.25, "share of contradicted tokens for which a whole place is left out", _CHOSEN, _UNKNOWN
    ),
    "placeholder-lead": Threshold(
        5, "times the contradicted share at tokens that are almost certain", _CHOSEN, _UNKNOWN
    ),
    "certain-tokens": Threshold(
        50, "fewest tokens within 1e-3 of 0 that are compared with those at 0", _CHOSEN, _UNKNOWN
    ),
    "padding-run": Threshold(2, "fewest 0.0 on both sides at the end of a padded response", _CHOSEN, _UNKNOWN),
    "padding-responses": Threshold(4, "fewest responses of one length that can be padded", _CHOSEN, _UNKNOWN),
    "padding-share": Threshold(0.2, "share of responses that end so", _CHOSEN, _UNKNOWN),
    "padding-bias": Threshold(
        0.05, "of k3, that certain last tokens taken for padding may cause", "computed", _UNKNOWN
    ),
    # The contract: the mean ratio of tokens that were drawn from the reported distribution is 1.
    "contract-z": Threshold(5.0, "standard errors from 1", _CHOSEN, _UNKNOWN),
    "contract-bet": Threshold(9.2, "nats won by betting on a mean above 1", "Ville's inequality", "1e-4 (bound)"),
    "contract-close": Threshold(0.001, "a mean this close to 1 is always accepted", _CHOSEN, _UNKNOWN),
    "contract-silent": Threshold(
        0.2, "standard error of the mean ratio beyond which it says nothing", _CHOSEN, _UNKNOWN
    ),
    # Repairs and confidence.
    "heals": Threshold(0.9, "part of k3 that a repair may leave", _CHOSEN, _UNKNOWN),
    "confidence-outside": Threshold(
        0.45, "plus half the squared share of k3, where something stays open", _CHOSEN, _UNKNOWN
    ),
    "confidence-unexplained": Threshold(0.65, "confidence of unexplained", "share right in the zoo", _UNKNOWN),
    # Values of another meaning.
    "log-base-error": Threshold(0.03, "of the log of the median ratio of the two log-probs", _CHOSEN, _UNKNOWN),
    "log-base-spread": Threshold(0.3, "median deviation of that log", _CHOSEN, _UNKNOWN),
    "log-base-left": Threshold(0.5, "part of the mean |log-ratio| that the conversion may leave", _CHOSEN, _UNKNOWN),
    "wrong-token-noise": Threshold(0.02, "nats: least size of noise", _CHOSEN, _UNKNOWN),
    "wrong-token-share": Threshold(0.05, "least share of tokens that are not the most likely one", _CHOSEN, _UNKNOWN),
    "wrong-token-between": Threshold(0.15, "share between noise and far, relative to the far ones", _CHOSEN, _UNKNOWN),
    "truncated-far": Threshold(0.02, "share of ratios below 1/e that truncation may have", _CHOSEN, _UNKNOWN),
    "truncated-mass": Threshold(0.65, "least kept mass that top-p and top-k are sure to explain", _CHOSEN, _UNKNOWN),
    "undelivered-order": Threshold(
        0.8, "rank correlation of steps and the size of their noise", _CHOSEN, "4 of 24 orders of four steps"
    ),
    # Noise.
    "noise-k3": Threshold(0.6, "largest k3 that is called noise", "4 bits in exact streams: .1", _UNKNOWN),
    "one-noise-share": Threshold(
        0.008, "of tokens beyond five usual shifts in one noise", "tails of 12 bases of the zoo, 5,000 tokens", _UNKNOWN
    ),
    "leftover-share": Threshold(0.03, "the same after a repair, which leaves some wrong pairs", _CHOSEN, _UNKNOWN),
    "one-noise-k3": Threshold(0.3, "of k3 in these tokens", "tails of 12 bases of the zoo, 5,000 tokens", _UNKNOWN),
    "coarse-noise-k3": Threshold(0.5, "the same for noise of quantized weights", "SmolLM2, 8 bits: .32", _UNKNOWN),
    "routing-share": Threshold(
        0.15, "most tokens beyond five usual shifts that other experts explain", _CHOSEN, _UNKNOWN
    ),
    "routing-k3": Threshold(0.5, "least share of k3 in them", "a mixture of experts, bfloat16: .9", _UNKNOWN),
}
THRESHOLDS = {name: row.value for name, row in TABLE.items()}
