"""Tensor functions for off-policy data. They read no model, file or configuration, and do not wait for the device.

reduce        selection of trained tokens, and sums over sequences
ratios        ratios of two policies: of tokens, sequences, turns and prefixes
weights       importance weights, bounded
masks         rejection rules
divergences   k1, k2, k3 and others of a token
statistics    sums and histograms that `+` merges over parts of a batch
correction    weights, masks and statistics of a batch in one pass
code_lines    the lines of a loss function in plain PyTorch, to which every part adds its own
arguments     checks of what callers pass
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
