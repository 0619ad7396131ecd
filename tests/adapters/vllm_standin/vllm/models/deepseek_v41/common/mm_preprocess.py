"""The token at every position of an image."""

IMAGE_SENTINEL_BASE_ID = 7
