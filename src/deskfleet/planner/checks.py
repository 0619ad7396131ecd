"""Refuses numbers that no plan can be made with. Owns one message; knows nothing of what is planned."""

from __future__ import annotations

from deskfleet.errors import ConfigError


def at_least(minimum: float, **values: float) -> None:
    """Check that each value, given by its name, is `minimum` or more. Raises ConfigError with the first that is not."""
    for name, value in values.items():
        if not value >= minimum:
            raise ConfigError(f"{name} is {value}", hint=f"give {minimum} or more")


def above_zero(**values: float) -> None:
    """Check that each value, given by its name, is more than zero. Raises ConfigError naming the first that is not."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}", hint="give a number above 0")


__all__ = ["above_zero", "at_least"]
