"""Benchmarks behind `hotbunk bench`."""
