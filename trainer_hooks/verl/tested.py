"""Versions of verl that the plugin was tested with. Importable without verl."""

TESTED = ("0.9.1",)
