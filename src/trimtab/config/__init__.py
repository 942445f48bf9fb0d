"""Recipes: TOML files read into one frozen, fully validated `Config`. Imports no torch."""

from trimtab.config.engine_sections import CanaryConfig, EngineConfig, RayConfig, ServerConfig, VllmConfig
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
    ShardingConfig,
    SurgeConfig,
)

__all__ = [
    "COMPANIONS",
    "CanaryConfig",
    "Config",
    "EngineConfig",
    "ExpertConfig",
    "LogConfig",
    "LoraConfig",
    "OptimConfig",
    "PerturbationConfig",
    "PrefixConfig",
    "RayConfig",
    "ServerConfig",
    "ShardingConfig",
    "SurgeConfig",
    "VllmConfig",
    "check_config",
    "load_config",
    "parse_override",
    "recipe_names",
]
