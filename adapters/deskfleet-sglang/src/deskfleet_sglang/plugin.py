"""The entry point. SGLang calls `register` in every process that loads plug-ins: server, scheduler, detokenizer.

SGLang logs what a plug-in raises and goes on without it, holding tables of 50 GB in memory instead; therefore whatever
goes wrong here ends the process, by SystemExit, which SGLang lets pass.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import TracebackType
from typing import Any

from deskfleet_engram.errors import EngramError
from deskfleet_sglang.adapter import Adapter
from deskfleet_sglang.contract import check_applied, check_release, check_switches, release_of
from deskfleet_sglang.settings import Settings, read_settings

_logger = logging.getLogger(__name__)
_installed: list[Adapter] = []


def register() -> None:
    """Register the hooks, once per process; does nothing without DESKFLEET_ENGRAM_PACK.

    Raises SystemExit with one sentence when SGLang is not what the plug-in was made for.
    """
    with _EndsProcess():
        settings = read_settings(os.environ)
        if settings is not None and not _installed:
            _installed.append(_install(settings))


def _install(settings: Settings) -> Adapter:
    sglang = importlib.import_module("sglang")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    release = release_of(str(sglang.__version__))
    digests = check_release(release)
    check_switches()
    adapter = Adapter(settings, release.version, digests)
    for hook in adapter.hooks:
        registry.HookRegistry.register(hook.target, hook.function, getattr(registry.HookType, hook.kind))
    _check_after_applying(registry.HookRegistry, adapter)
    return adapter


def _check_after_applying(registry: Any, adapter: Adapter) -> None:
    """Look whether the hooks are in place right after SGLang applied all plug-ins' hooks, which it does once."""
    apply_hooks = registry.apply_hooks

    @functools.wraps(apply_hooks)
    def apply_and_check() -> None:
        registry.apply_hooks = apply_hooks
        apply_hooks()
        with _EndsProcess():
            check_applied(adapter.hooks)

    registry.apply_hooks = apply_and_check


class _EndsProcess:
    """Turns every error of the body into the end of the process."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, EngramError):
            sentence = "; ".join(str(error).splitlines())
        else:
            sentence = f"{type(error).__name__}: {error}"
        _logger.critical("deskfleet-sglang refuses to start: %s", sentence)
        raise SystemExit(f"deskfleet-sglang refuses to start: {sentence}") from error


__all__ = ["register"]
