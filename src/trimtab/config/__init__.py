"""Recipes: TOML in, one frozen and fully checked `Config` out. No torch here, so the command line stays fast."""

from trimtab.config.recipes import check_config, load_config, parse_override, recipe_names
from trimtab.config.schema import (
    COMPANIONS,
    Config,
    ExpertConfig,
    LogConfig,
    LoraConfig,
    OptimConfig,
    PerturbationConfig,
    PrefixConfig,
    SurgeConfig,
)

__all__ = [
    "COMPANIONS",
    "Config",
    "ExpertConfig",
    "LogConfig",
    "LoraConfig",
    "OptimConfig",
    "PerturbationConfig",
    "PrefixConfig",
    "SurgeConfig",
    "check_config",
    "load_config",
    "parse_override",
    "recipe_names",
]
