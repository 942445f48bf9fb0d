"""Recipes: TOML files read into one frozen, fully validated `Config`. Imports no torch.

recipes          reads a recipe with its bases, paths and overrides, and explains what is wrong in it
schema           all sections; those of updates and engines are in `sections`, with their base class
consistency      settings that contradict each other, and keys without effect
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
