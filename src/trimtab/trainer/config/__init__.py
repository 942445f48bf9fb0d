"""Recipes: TOML files read into one frozen, fully validated `Config`. Imports no torch."""

from trimtab.trainer.config.engine_sections import CanaryConfig, EngineConfig, RayConfig, ServerConfig, VllmConfig
from trimtab.trainer.config.recipes import (
    is_recipe,
    load_config,
    parse_config,
    parse_override,
    recipe_names,
    split_overrides,
)
from trimtab.trainer.config.schema import (
    GOLD,
    REQUIRED_SECTIONS,
    Config,
    DemonstrationConfig,
    LogConfig,
    LoraConfig,
    PerturbationConfig,
    PrefixConfig,
    ShardingConfig,
)
from trimtab.trainer.config.training_sections import (
    BATCH_BASELINE,
    DISTILLATION,
    TOKEN_BASELINE,
    EssConfig,
    OptimConfig,
)

__all__ = [
    "BATCH_BASELINE",
    "DISTILLATION",
    "GOLD",
    "REQUIRED_SECTIONS",
    "TOKEN_BASELINE",
    "CanaryConfig",
    "Config",
    "DemonstrationConfig",
    "EngineConfig",
    "EssConfig",
    "LogConfig",
    "LoraConfig",
    "OptimConfig",
    "PerturbationConfig",
    "PrefixConfig",
    "RayConfig",
    "ServerConfig",
    "ShardingConfig",
    "VllmConfig",
    "is_recipe",
    "load_config",
    "parse_config",
    "parse_override",
    "recipe_names",
    "split_overrides",
]
