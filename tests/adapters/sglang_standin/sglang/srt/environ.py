"""Variables, read when they are asked for."""

import os
from types import SimpleNamespace


class _Variable:
    def __init__(self, name, default):
        self.name, self.default = name, default

    def get(self):
        value = os.environ.get(self.name)
        if value is None:
            return self.default
        return value.lower() in ("1", "true") if isinstance(self.default, bool) else value


_DEFAULTS = {
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": False,
    "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": "shared",
    "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": False,
}
envs = SimpleNamespace(**{name: _Variable(name, default) for name, default in _DEFAULTS.items()})
