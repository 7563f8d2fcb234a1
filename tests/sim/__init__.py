"""Deterministic simulation of trainers, workers and servers; see ``python -m tests.sim --help``."""
