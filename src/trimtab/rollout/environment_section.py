"""The environment of a recipe."""

from __future__ import annotations

from trimtab.config import Config
from trimtab.environments import EnvironmentSpec


def environment_spec(config: Config, kind: type | None = None) -> EnvironmentSpec | None:
    """Returns what the section `[environment]` says, or None without one; `kind` replaces the class it names."""
    section = config.environment
    if section is None:
        return None
    return EnvironmentSpec(
        name=kind or section.name,
        options=section.keywords,
        format=section.format,
        instructions=section.instructions,
        turns=section.max_turns,
        turn_tokens=section.max_turn_tokens,
        observation_tokens=section.max_observation_tokens,
        timeout=section.timeout,
        answer=section.answer,
    )
