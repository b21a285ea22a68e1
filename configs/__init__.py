"""Hydra config groups."""
