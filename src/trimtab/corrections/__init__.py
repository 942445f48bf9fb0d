"""Pure tensor functions for off-policy data: ratios, weights, rejection masks, divergences, statistics.

Nothing here knows a model, a file or a configuration, and nothing waits for the device.
"""

from trimtab.corrections.correction import Sweep, sweep
from trimtab.corrections.masks import OPSM, Band, Divergence, Evidence, Mask, Veto
from trimtab.corrections.protocols import Peers, Setting
from trimtab.corrections.ratios import LEVELS, LOG_RATIO_BOUND, Ratios, log_ratio
from trimtab.corrections.reduce import Sequences, finite_rows, select
from trimtab.corrections.statistics import Histogram, Mean, Mergeable, RatioStatistics
from trimtab.corrections.weights import Weight

__all__ = [
    "LEVELS",
    "LOG_RATIO_BOUND",
    "OPSM",
    "Band",
    "Divergence",
    "Evidence",
    "Histogram",
    "Mask",
    "Mean",
    "Mergeable",
    "Peers",
    "RatioStatistics",
    "Ratios",
    "Sequences",
    "Setting",
    "Sweep",
    "Veto",
    "Weight",
    "finite_rows",
    "log_ratio",
    "select",
    "sweep",
]
