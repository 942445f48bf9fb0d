"""Tensor functions for off-policy data: ratios, weights, rejection masks, divergences, statistics.

They read no model, file or configuration, and do not synchronize with the device.
"""

from trimtab.corrections.correction import BatchCorrection, compute_correction
from trimtab.corrections.masks import OPSM, Band, Divergence, Evidence, Mask, PrefixBudget, Veto
from trimtab.corrections.ratios import LEVELS, LOG_RATIO_BOUND, PREFIX_LEVELS, TURN_LEVELS, Ratios, log_ratio
from trimtab.corrections.reduce import Sequences, finite_rows, select
from trimtab.corrections.statistics import Histogram, Mean, Mergeable, RatioStatistics
from trimtab.corrections.weights import Weight

__all__ = [
    "LEVELS",
    "LOG_RATIO_BOUND",
    "OPSM",
    "PREFIX_LEVELS",
    "TURN_LEVELS",
    "Band",
    "BatchCorrection",
    "Divergence",
    "Evidence",
    "Histogram",
    "Mask",
    "Mean",
    "Mergeable",
    "PrefixBudget",
    "RatioStatistics",
    "Ratios",
    "Sequences",
    "Veto",
    "Weight",
    "compute_correction",
    "finite_rows",
    "log_ratio",
    "select",
]
