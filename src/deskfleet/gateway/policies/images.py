"""How many images a request may have, how large, and whether their URLs are fetched. Owns the limits alone.

images.py keeps them for what a request carries, image_fetch.py for what it points at.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated

from pydantic import BeforeValidator, Field

from deskfleet.gateway.policies.section import Bytes, Seconds, Section

Ports = Annotated[
    tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class ImageFetchSettings(Section):
    """Fetching of images that a request names by URL."""

    enabled: bool = Field(default=False, description="Whether http and https URLs are fetched.")
    max_urls: int = Field(default=8, ge=1, le=256, description="URLs in one request.")
    timeout_s: Seconds = Field(
        default=10.0, gt=0, le=300, description="Seconds for all images of a request, redirects included."
    )
    max_redirects: int = Field(default=3, ge=0, le=10, description="Redirects of one URL.")
    ports: Ports = Field(default=(80, 443), min_length=1, description="Ports that may be connected to.")


class ImageSettings(Section):
    """What images a request may have."""

    max_images: int = Field(default=64, ge=1, description="Images in one request.")
    max_image_bytes: Bytes = Field(default=20 * 2**20, ge=1, description="Bytes of one image's file.")
    max_image_pixels: int = Field(
        default=64 * 10**6,
        ge=1,
        description="Width times height of one image. Decoding takes three bytes each.",
    )
    fetch: ImageFetchSettings = Field(
        default=ImageFetchSettings(), description="Fetching of images that a request names by URL."
    )


IMAGE_LIMITS: ContextVar[ImageSettings | None] = ContextVar("image_limits", default=None)
"""The caller's limits, which go with its task and into the thread where images are read; None: the gateway's own."""


__all__ = ["IMAGE_LIMITS", "ImageFetchSettings", "ImageSettings"]
