"""Recipes: TOML files, read into a frozen and validated `Config`. Does not import torch.

recipes            reads a recipe with its bases, paths and overrides, and explains errors
schema             a whole recipe, `Config`, and its sections on evaluation, files, Ray and comparisons
training_sections  sections on the model and its training
rollout_sections   sections on tasks, environments, engines, sampling and rewards
base               the base class of sections, and the types of their values
consistency        finds contradictory settings and keys without effect
"""

from trimtab.trainer.config.recipes import LABORATORY_MODELS as LABORATORY_MODELS
from trimtab.trainer.config.recipes import is_recipe as is_recipe
from trimtab.trainer.config.recipes import load_config as load_config
from trimtab.trainer.config.recipes import parse_config as parse_config
from trimtab.trainer.config.recipes import parse_override as parse_override
from trimtab.trainer.config.recipes import recipe_names as recipe_names
from trimtab.trainer.config.recipes import split_overrides as split_overrides
from trimtab.trainer.config.rollout_sections import GOLD as GOLD
from trimtab.trainer.config.rollout_sections import EngineConfig as EngineConfig
from trimtab.trainer.config.rollout_sections import EnvironmentConfig as EnvironmentConfig
from trimtab.trainer.config.rollout_sections import PrefixConfig as PrefixConfig
from trimtab.trainer.config.schema import REQUIRED_SECTIONS as REQUIRED_SECTIONS
from trimtab.trainer.config.schema import Config as Config
from trimtab.trainer.config.schema import LogConfig as LogConfig
from trimtab.trainer.config.training_sections import BATCH_BASELINE as BATCH_BASELINE
from trimtab.trainer.config.training_sections import DISTILLATION as DISTILLATION
from trimtab.trainer.config.training_sections import TOKEN_BASELINE as TOKEN_BASELINE
from trimtab.trainer.config.training_sections import OptimConfig as OptimConfig
