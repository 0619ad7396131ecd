"""Servers run on uvloop where it is installed and on asyncio's loop where it is not."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys

import pytest

from deskfleet.gateway.loop import run_server, settle


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


def test_a_server_may_open_as_many_files_as_it_is_allowed() -> None:
    async def limits() -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert run_server(limits()) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_was_loaded_is_left_alone() -> None:
    try:
        settle()
        assert gc.get_freeze_count() > 1000
        assert gc.isenabled()
    finally:
        gc.unfreeze()
