"""One contract between RL trainers and rollout engines: sleep, wake, pause, resume, weight sync.

Importing this package loads no engine, no torch and no numpy.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
