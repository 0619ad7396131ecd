"""Servers run on uvloop where it is installed and on asyncio's loop where it is not."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from deskfleet.cli.loop import run_server, settle


async def whose_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize(("is_installed", "expected"), [(True, "uvloop"), (False, "asyncio")])
def test_the_loop_is_the_one_that_is_there(
    is_installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_installed:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run_server(whose_loop()) == expected


def test_what_was_loaded_is_left_alone() -> None:
    try:
        settle()
        assert gc.get_freeze_count() > 1000
        assert gc.isenabled()
    finally:
        gc.unfreeze()
