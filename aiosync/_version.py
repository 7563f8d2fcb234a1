"""The version of aiosync, in the one place where it is written; the build reads it from here."""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""Version of the package, as PEP 440 text."""
