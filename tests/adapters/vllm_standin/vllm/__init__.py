"""Stands in for vLLM 0.33 where the plug-in touches it, and computes nothing like it."""

__version__ = "0.33.0"
