"""Environments of multi-turn episodes: tools, the text format of calls and results, the episodes of a request."""

from trimtab.trainer.environments.built import BuiltEnvironment, build

__all__ = ["BuiltEnvironment", "build"]
