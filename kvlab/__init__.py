"""kvlab: a decode loop and its KV cache, small enough to read in an evening."""

__version__ = "0.1.0"
