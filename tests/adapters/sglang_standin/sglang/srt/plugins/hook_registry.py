"""Hooks around functions and in place of classes; what goes wrong is logged and forgotten."""

import enum
import functools
import logging
import pkgutil


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict = {}  # noqa: RUF012
    _patched: set = set()  # noqa: RUF012

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            try:
                cls._apply_target(target, hooks)
                cls._patched.add(target)
            except Exception:
                logging.exception("Failed to apply hooks to %s", target)

    @classmethod
    def _apply_target(cls, target, hooks):
        place, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(place)
        raw = vars(owner).get(name)
        wrapped = raw.__func__ if isinstance(raw, classmethod) else getattr(owner, name)
        for hook_type, hook in hooks:
            wrapped = hook if isinstance(hook, type) else _wrap_fn(wrapped, hook, hook_type)
        setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)


def _wrap_fn(original_fn, hook, hook_type):
    @functools.wraps(original_fn)
    def wrapper(*args, **kwargs):
        if hook_type == HookType.AROUND:
            return hook(original_fn, *args, **kwargs)
        if hook_type == HookType.BEFORE:
            changed = hook(*args, **kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
            return original_fn(*args, **kwargs)
        result = original_fn(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    wrapper.__wrapped__ = original_fn
    return wrapper
