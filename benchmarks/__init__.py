"""Measurements of handspan; each module is a command, ``python -m benchmarks.NAME``."""
