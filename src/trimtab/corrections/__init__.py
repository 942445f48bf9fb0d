"""Tensor functions for off-policy data. They read no model, file or configuration, and do not wait for the device.

reduce        selection of trained tokens, and sums over sequences
ratios        ratios of two policies: of tokens, sequences, turns and prefixes
weights       importance weights, bounded
masks         rejection rules
divergences   per-token divergences: k1, k2, k3 and others
statistics    sums and histograms that `+` merges over parts of a batch
correction    weights, masks and statistics of a batch in one pass
code_lines    prints a loss as a plain PyTorch function, to which every part adds its lines
policy_logps  the log-probs that callers pass; fields: checked fields of parts
"""

from trimtab.corrections.correction import compute_correction as compute_correction
from trimtab.corrections.masks import OPSM as OPSM
from trimtab.corrections.masks import Band as Band
from trimtab.corrections.masks import Divergence as Divergence
from trimtab.corrections.masks import Mask as Mask
from trimtab.corrections.masks import PrefixBudget as PrefixBudget
from trimtab.corrections.masks import RuleInputs as RuleInputs
from trimtab.corrections.masks import Veto as Veto
from trimtab.corrections.ratios import LEVELS as LEVELS
from trimtab.corrections.ratios import LOG_RATIO_BOUND as LOG_RATIO_BOUND
from trimtab.corrections.ratios import Ratios as Ratios
from trimtab.corrections.ratios import log_ratio as log_ratio
from trimtab.corrections.reduce import Sequences as Sequences
from trimtab.corrections.reduce import finite_rows as finite_rows
from trimtab.corrections.reduce import select as select
from trimtab.corrections.statistics import Histogram as Histogram
from trimtab.corrections.statistics import Mergeable as Mergeable
from trimtab.corrections.weights import Weight as Weight
