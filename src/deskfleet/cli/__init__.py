"""The command line: one module per verb. Parses and prints; whatever does the work is a function elsewhere."""

from deskfleet.cli.app import main

__all__ = ["main"]
