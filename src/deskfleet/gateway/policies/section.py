"""A section of the settings file: strict, frozen, and able to lie over another one.

Owns how a section is checked and how layers are laid over each other. Knows no policy.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict

from deskfleet.errors import ConfigError
from deskfleet.units import parse_bytes


class Section(BaseModel):
    """What one policy can be told. Every field has a default, so that a file says only what differs."""

    # A ValidationError would otherwise repeat what the file says, and somebody will paste a key into it.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    def under(self, upper: Self | None) -> Self:
        """Return this section with whatever `upper` says itself laid over it, field by field.

        A field that `upper` leaves out keeps this section's value, also where its default differs. A section within a
        section is laid over in the same way.
        """
        if upper is None:
            return self
        said: dict[str, Any] = {}
        for name in upper.model_fields_set:
            value, below = getattr(upper, name), getattr(self, name)
            nested = isinstance(value, Section) and isinstance(below, Section)
            said[name] = below.under(value) if nested else value
        return self.model_copy(update=said)


def _parse_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from error


def _whole_as_float(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Bytes = Annotated[int, BeforeValidator(_parse_size)]
"""A number of bytes, or text such as "20MiB"."""

Seconds = Annotated[float, BeforeValidator(_whole_as_float)]
"""Seconds; a whole number will do."""

Fraction = Annotated[float, BeforeValidator(_whole_as_float)]
"""A number that may be written without a point."""


__all__ = ["Bytes", "Fraction", "Seconds", "Section"]
