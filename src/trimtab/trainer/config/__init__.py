"""Recipes: TOML files, read into a frozen and validated `Config`. Does not import torch.

recipes          reads a recipe with its bases, paths and overrides, and explains errors
schema           all sections, except the base class and the sections on updates and engines
sections         the base class of sections, and the sections on updates and engines
consistency      finds contradictory settings and keys without effect
"""

from trimtab.trainer.config.recipes import LABORATORY_MODELS as LABORATORY_MODELS
from trimtab.trainer.config.recipes import is_recipe as is_recipe
from trimtab.trainer.config.recipes import load_config as load_config
from trimtab.trainer.config.recipes import parse_config as parse_config
from trimtab.trainer.config.recipes import parse_override as parse_override
from trimtab.trainer.config.recipes import recipe_names as recipe_names
from trimtab.trainer.config.recipes import split_overrides as split_overrides
from trimtab.trainer.config.schema import GOLD as GOLD
from trimtab.trainer.config.schema import REQUIRED_SECTIONS as REQUIRED_SECTIONS
from trimtab.trainer.config.schema import Config as Config
from trimtab.trainer.config.schema import EnvironmentConfig as EnvironmentConfig
from trimtab.trainer.config.schema import LogConfig as LogConfig
from trimtab.trainer.config.schema import PrefixConfig as PrefixConfig
from trimtab.trainer.config.sections import BATCH_BASELINE as BATCH_BASELINE
from trimtab.trainer.config.sections import DISTILLATION as DISTILLATION
from trimtab.trainer.config.sections import TOKEN_BASELINE as TOKEN_BASELINE
from trimtab.trainer.config.sections import EngineConfig as EngineConfig
from trimtab.trainer.config.sections import OptimConfig as OptimConfig
