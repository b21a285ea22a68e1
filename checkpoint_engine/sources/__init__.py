"""Where weights come from, besides modules and state dicts (:mod:`hotbunk.checkpoint_engine.source`)."""
