"""The model's package, which imports its tables before anybody can, as the real one does."""

from .common import engram


class DeepseekV41ForCausalLM:
    """A model whose layers have tables."""

    engram = engram
