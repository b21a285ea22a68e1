"""Ways to move weights, one module each; found through the `hotbunk.transports` entry points."""
