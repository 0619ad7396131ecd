"""deskfleet: serve DeepSeek-V4.1-Flash and DeepSeek-V4-Flash from the machines on your desk."""

__version__ = "0.1.0"

__all__ = ["__version__"]
