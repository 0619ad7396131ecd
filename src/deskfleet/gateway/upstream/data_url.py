"""An image as a data URL, which is how both engines take one. Knows nothing of what is in it but its kind."""

from __future__ import annotations

import base64

from deskfleet.endpoint import ImageInput

_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
"""How a file begins -> its media type."""


def data_url(image: ImageInput) -> str:
    """Return an image's file as a data URL."""
    kind = next((kind for magic, kind in _KINDS.items() if image.data.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image.data).decode()}"


__all__ = ["data_url"]
