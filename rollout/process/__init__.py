"""Replicas in processes of their own: started, supervised, and driven through a handle."""

from hotbunk.rollout.process.handle import ProcessHandle, start, start_replica
from hotbunk.rollout.process.launch import shutdown, trim
from hotbunk.rollout.process.spec import ReplicaSpec

__all__ = ["ProcessHandle", "ReplicaSpec", "shutdown", "start", "start_replica", "trim"]
