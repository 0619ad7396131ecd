"""Engram rows of DeepSeek-V4.1 from disk, for stock vLLM: a general plug-in, switched on by `--additional-config`.

`register` is the entry point. Without `{"deskfleet_engram": {"pack": DIR}}` the engine stays as it is.
"""

from __future__ import annotations

import json
import logging
import sys


def register() -> None:
    """Make ready to replace the table of Engram rows when a model asks for it.

    vLLM calls this in every process, before it has a configuration. Where the command line names our key, settings and
    release are checked at once, and what ranks count is added to the process's metrics; everything else happens when a
    model builds its tables, and only if its configuration names us. Calling it twice changes nothing. Raises
    ContractError for settings that are none, and for a release that this plug-in was not made for.
    """
    from deskfleet_vllm.config import KEY, Settings, default_receipts
    from deskfleet_vllm.exposition import expose
    from deskfleet_vllm.seam import install

    named = [argument for argument in sys.argv[1:] if KEY in argument]
    settings = None
    for argument in named:
        text = argument.partition("=")[2] if argument.startswith("--") else argument
        try:
            settings = Settings.read(json.loads(text))
        except ValueError:  # spelled in another of vLLM's ways; the model's configuration will say it
            continue
    install(asked=bool(named), allow_untested=settings is not None and settings.allow_untested)
    if named:
        expose(default_receipts() if settings is None else settings.receipts_dir())
        logging.getLogger("vllm.deskfleet_engram").info("deskfleet-engram: ready in this process")


__all__ = ["register"]
