"""The model's package, which imports its tables before anybody can, as the real one does."""

from .common import engram
from .nvidia.model_state import DeepseekV41ModelState


class DeepseekV41ForCausalLM:
    """A model whose layers have tables, and a hasher."""

    engram = engram

    def __init__(self, *found):
        self.found = found

    def modules(self):
        yield from self.found

    def get_model_state_cls(self):
        return DeepseekV41ModelState
