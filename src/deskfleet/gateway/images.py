"""From an image's data URL to encoded bytes and a token count.

Owns what an image in a request may be, and the ticket that stands for it while the publisher's library reorders
messages. Knows nothing of messages, and cannot open a connection: a URL that is not a data URL is refused here, before
anything else sees it.

The bytes go on as the client sent them, because the engine's preprocessing is the publisher's reference and
resizing twice gives other pixels. (The library's own resolver resizes with OpenCV, for the released model's
geometry whatever the checkpoint says, and encodes again as WebP.) Only `detail: low` changes them.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass, field

from PIL import Image

from deskfleet.errors import RequestError
from deskfleet.gateway.policies.images import ImageSettings
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.config import VisionConfig
from deskfleet.model.vision import plan_image

LOW_DETAIL_SIDE = 512
"""Longest side in pixels of an image sent with `detail: low`."""

_TICKET_PREFIX = "data:image/png;base64,"

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP"}


@dataclass(frozen=True, slots=True)
class ImageReference:
    """One image of a request: where the client put it, and what it sent there."""

    path: str
    url: str
    low_detail: bool = False


def take_ticket(images: list[ImageReference], reference: ImageReference) -> str:
    """Add an image to those of a request and return the URL that stands for it in what the library sees.

    The library reorders tool results, and their images with them; `ticket_number` turns the ticket back into the
    image's index. It looks at an image's URL only far enough to see a known media type and valid base64.
    """
    images.append(reference)
    return _TICKET_PREFIX + base64.b64encode(str(len(images) - 1).encode()).decode()


def ticket_number(data_url: str | None) -> int:
    """Return the index that a ticket of `take_ticket` stands for."""
    if data_url is None or not data_url.startswith(_TICKET_PREFIX):
        raise ValueError(f"not an image ticket: {data_url!r}")
    return int(base64.b64decode(data_url.removeprefix(_TICKET_PREFIX)))


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One image, ready for the engine. `num_tokens` is its whole span, delimiters included."""

    data: bytes = field(repr=False)
    num_tokens: int


def read_images(
    references: list[ImageReference],
    vision: VisionConfig | None,
    settings: GatewaySettings | ImageSettings,
) -> list[RequestImage]:
    """Decode and check every image of a request.

    Raises RequestError naming the image's place: no vision tower, too many images, not a data URL, bad
    base64, not PNG, JPEG or WebP, too large, damaged.
    """
    if references and vision is None:
        raise RequestError("this checkpoint has no vision tower", param=references[0].path)
    if len(references) > settings.max_images:
        raise RequestError(
            f"{len(references)} images exceed the limit of {settings.max_images}",
            param=references[settings.max_images].path,
        )
    return [_read_image(reference, vision, settings) for reference in references if vision is not None]


def _read_image(
    reference: ImageReference, vision: VisionConfig, settings: GatewaySettings | ImageSettings
) -> RequestImage:
    try:
        data = _decode_data_url(reference.url, settings.max_image_bytes)
        image = _open(data, settings.max_image_pixels)
    except ValueError as error:
        raise RequestError(f"{reference.path}: {error}", param=reference.path) from error
    if reference.low_detail and max(image.size) > LOW_DETAIL_SIDE:
        image.thumbnail((LOW_DETAIL_SIDE, LOW_DETAIL_SIDE))
        data = _encode_png(image)
    try:
        return RequestImage(data, plan_image(*image.size, vision).num_tokens)
    except RequestError as error:
        raise RequestError(f"{reference.path}: {error.message}", param=reference.path) from error


def _decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the bytes of `data:MEDIA;base64,...`. Raises ValueError saying what is wrong with it."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise ValueError("only data URLs are supported, nothing is fetched; send data:image/png;base64,...")
    header, comma, payload = rest.partition(",")
    media, *parameters = header.lower().split(";")
    if not comma or "base64" not in parameters:
        raise ValueError("the data URL is not base64; send data:image/png;base64,...")
    if media not in _FORMATS:
        raise ValueError(f"media type {media!r} is not supported; send PNG, JPEG or WebP")
    if len(payload) // 4 * 3 > max_bytes + 3:
        raise ValueError(f"the image exceeds {max_bytes} bytes")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the base64 is damaged: {error}") from error


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """Decode `data` completely. Raises ValueError saying what is wrong with it."""
    try:
        # The bytes decide, not the media type: browsers and front-ends mislabel JPEG as PNG all the time.
        image = Image.open(io.BytesIO(data), formats=sorted(set(_FORMATS.values())))
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width}x{image.height} exceeds {max_pixels} pixels")
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError("not a readable PNG, JPEG or WebP image") from error
    return image


def _encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


__all__ = [
    "LOW_DETAIL_SIDE",
    "ImageReference",
    "RequestImage",
    "read_images",
    "take_ticket",
    "ticket_number",
]
