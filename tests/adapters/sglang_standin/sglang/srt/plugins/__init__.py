"""Loads plug-ins; what they raise is logged and forgotten."""

import logging
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry

_loaded = False


def load_plugins():
    global _loaded
    if _loaded:
        return
    _loaded = True
    for entry in entry_points(group="sglang.srt.plugins"):
        try:
            entry.load()()
        except Exception:
            logging.exception("Failed to execute general plugin: %s", entry.name)
    HookRegistry.apply_hooks()
