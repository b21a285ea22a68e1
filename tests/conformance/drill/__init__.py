"""Random faults in syncs between processes, and whether every promise of the contract held.

``plan.py`` draws what goes wrong, ``engine.py`` makes it happen inside an engine's process, ``run.py``
syncs through it and looks, ``promises.py`` says what must be true afterwards. Engines are oracles
(simulated: their tokens say which weights made them) in real processes, behind real transports.
"""
