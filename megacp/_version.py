"""The version, in its one place; setup.py reads this file."""

__version__ = "0.1.0"
