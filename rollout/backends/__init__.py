"""Rollout engines, one module or package each; found through the `hotbunk.backends` entry points."""
