"""hotbunk in verl: a plugin that ``import verl`` finds. Nothing heavy is imported here.

plugin.py            what verl loads: names for its registries, added when it has loaded them
cpu.py               a platform without an accelerator; a plugin of its own
settings.py          verl's configuration as ours
server.py            the actor that holds a replica; handle.py is its remote control
replica.py           verl's RolloutReplica, which launches servers
rollout.py           verl's BaseRollout, in a trainer's or a rollout's worker
engines.py           verl's six-method CheckpointEngine over our transports
worker.py            the trainer's ranks: sources of weights, offers
manager.py           verl's CheckpointEngineManager, with ours inside
trainers.py          trainer modes that use it
surfaces.py          what of verl all this stands on
"""
