"""Recipes: TOML files, read into a frozen and validated `Config`. Does not import torch.

recipes          reads a recipe with its bases, paths and overrides, and explains errors
schema           all sections, except the base class and the sections on updates and engines
sections         the base class of sections, and the sections on updates and engines
consistency      finds contradictory settings and keys without effect
"""

from trimtab.trainer.config.recipes import (
    LABORATORY_MODELS,
    is_recipe,
    load_config,
    parse_config,
    parse_override,
    recipe_names,
    split_overrides,
)
from trimtab.trainer.config.schema import GOLD, REQUIRED_SECTIONS, Config, EnvironmentConfig, LogConfig, PrefixConfig
from trimtab.trainer.config.sections import BATCH_BASELINE, DISTILLATION, TOKEN_BASELINE, EngineConfig, OptimConfig

__all__ = [
    "BATCH_BASELINE",
    "DISTILLATION",
    "GOLD",
    "LABORATORY_MODELS",
    "REQUIRED_SECTIONS",
    "TOKEN_BASELINE",
    "Config",
    "EngineConfig",
    "EnvironmentConfig",
    "LogConfig",
    "OptimConfig",
    "PrefixConfig",
    "is_recipe",
    "load_config",
    "parse_config",
    "parse_override",
    "recipe_names",
    "split_overrides",
]
