"""Backends that the suite ships a description of."""
