"""Speaking to a server over HTTP: what its backends have in common. Needs the extra ``http``."""
