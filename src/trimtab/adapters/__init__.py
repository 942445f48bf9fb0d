"""Objectives inside other trainers, and in their configuration."""
