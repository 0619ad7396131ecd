"""Which way of reading is used, why, and that nothing about the choice is silent."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
from native_fixtures import BACKENDS, LAYER, World, failure_of, gathered, make_world, open_reader, outputs

from deskfleet_engram import _native
from deskfleet_engram.errors import NativeError, RowError
from deskfleet_engram.native import NativeOptions, NativeReader, NativeStore, RowCache
from deskfleet_engram.native_functions import accelerate_blocks, hash_ids, is_available
from deskfleet_engram.store import PackedLayer, open_store, open_stores

SANDBOX = """
    import ctypes, errno, os, struct, sys
    import numpy as np

    def refuse(numbers):
        # A seccomp filter: load the call's number, refuse the listed ones with EPERM, allow the rest.
        code = [struct.pack("HBBI", 0x20, 0, 0, 0)]
        for number in numbers:
            code.append(struct.pack("HBBI", 0x15, 0, 1, number))
            code.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM))
        code.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
        body = ctypes.create_string_buffer(b"".join(code))
        program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(body))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, os.strerror(ctypes.get_errno())

    refuse([int(number) for number in sys.argv[2].split(",")])
    from pathlib import Path
    from deskfleet_engram.native import NativeOptions
    from deskfleet_engram.store import PackedLayer, open_store
    from deskfleet_engram.portable_pack import PortablePack
    ids = np.arange(0, 2000, 3)
    options = NativeOptions(backend=sys.argv[3])
    with open_store(PackedLayer(Path(sys.argv[1]), 1), backend="native", options=options) as store:
        found = np.empty((len(ids), 256), np.uint8), np.empty((len(ids), 8), np.uint8)
        store.gather(ids, *found)
        print(store.report.details["backend"], "|", store.report.details["backend_reason"])
    expected = np.empty((len(ids), 256), np.uint8), np.empty((len(ids), 8), np.uint8)
    with PortablePack(Path(sys.argv[1]), 1) as portable:
        portable.gather(ids, *expected)
    assert (found[0] == expected[0]).all() and (found[1] == expected[1]).all()
"""
IO_SETUP = {"x86_64": 206, "aarch64": 0}
IO_URING_SETUP = 425


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("backends"))


def run_refusing(world: World, calls: list[int], backend: str = "auto") -> subprocess.CompletedProcess[str]:
    numbers = ",".join(map(str, calls))
    command = [sys.executable, "-c", textwrap.dedent(SANDBOX), str(world.pack_dir), numbers, backend]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


needs_uring = pytest.mark.skipif("io_uring" not in BACKENDS, reason="this sandbox refuses io_uring")
needs_aio = pytest.mark.skipif("aio" not in BACKENDS, reason="this sandbox refuses native AIO")


@needs_aio
def test_a_sandbox_without_io_uring_gets_aio(world: World) -> None:
    result = run_refusing(world, [IO_URING_SETUP])
    assert result.returncode == 0, result.stderr
    assert result.stdout == "aio | io_uring unavailable: io_uring_setup: Operation not permitted\n"


@needs_uring
@needs_aio
def test_a_sandbox_that_lets_only_the_setup_pass(world: World) -> None:
    result = run_refusing(world, [IO_URING_SETUP + 1])  # io_uring_enter
    assert result.returncode == 0, result.stderr
    assert result.stdout == "aio | io_uring unavailable: io_uring_enter: Operation not permitted\n"


def test_a_sandbox_without_either_gets_the_pool(world: World) -> None:
    result = run_refusing(world, [IO_URING_SETUP, IO_SETUP[platform.machine()]])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("pool | io_uring unavailable: ")
    assert "aio unavailable: io_setup: Operation not permitted" in result.stdout


def test_a_backend_that_was_asked_for_is_not_replaced(world: World) -> None:
    result = run_refusing(world, [IO_URING_SETUP], "io_uring")
    assert result.returncode == 1
    assert "NativeError: io_uring unavailable: io_uring_setup: Operation not permitted" in result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report(world: World, backend: str) -> None:
    options = NativeOptions(backend=backend, depth=48)
    with open_reader(world.place("pack", second="shard"), options=options, cache_bytes=10**5) as reader:
        report = reader.report
    assert report["backend"] == backend
    assert report["backend_reason"] == "as asked"
    assert report["backend_detail"]
    assert report["depth"] == "48"
    assert report["layer.1"] == "pack, checked, 3 of 3 columns; second source: shard, unchecked"
    assert report["cache"].endswith("bytes in all")
    assert report["cpu"].startswith("crc ")


def test_the_pool_works_everywhere() -> None:
    assert BACKENDS[-1] == "pool"


def test_the_first_choice(world: World) -> None:
    with open_reader(world.place("pack")) as reader:
        assert reader.report["backend"] == BACKENDS[0]
        reason = reader.report["backend_reason"]
        assert reason == "first choice" if BACKENDS[0] == "io_uring" else "unavailable" in reason


def test_buffered_reading_is_reported(world: World) -> None:
    ids = np.arange(100)
    for backend in ("auto", *BACKENDS):
        options = NativeOptions(backend=backend, direct="never")
        with open_reader(world.place("pack"), options=options) as reader:
            np.testing.assert_array_equal(
                gathered(NativeStore(reader, LAYER), ids)[0], world.expected(ids)[0]
            )
            assert reader.report["direct"] == "0 of 3 files; buffered: as asked"
            if backend == "aio":
                assert "not asynchronous" in reader.report["backend_detail"]


def test_a_file_system_without_direct_reads(world: World) -> None:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        pytest.skip("no memory file system to write to")
    with tempfile.TemporaryDirectory(dir=path) as directory:
        shutil.copytree(world.pack_dir, Path(directory) / "pack")
        layer = PackedLayer(Path(directory) / "pack", LAYER)
        strict = NativeOptions(direct="require")
        refused = failure_of(lambda: open_store(layer, backend="native", options=strict).close())
        assert refused is None or "for direct reads" in str(refused)  # newer kernels can
        with open_store(layer, backend="native") as store:
            direct = store.report.details["direct"]
            assert direct == "3 of 3 files" if refused is None else "Invalid argument" in direct
            out = outputs(world.format, 3)
            store.gather(np.array([1, 2, 3]), *out)
            np.testing.assert_array_equal(out[0], world.expected(np.array([1, 2, 3]))[0])


def test_without_the_library(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "_find", lambda: None)
    layer = PackedLayer(world.pack_dir, LAYER)
    with pytest.raises(NativeError, match="not installed") as caught:
        open_store(layer, backend="native")
    assert caught.value.hint is not None
    assert "portable" in caught.value.hint
    with pytest.raises(NativeError):
        NativeReader([world.place("pack")])
    with pytest.raises(NativeError):
        RowCache(1000)
    with pytest.raises(NativeError):
        hash_ids(world.source.geometry, np.array([1]), start=0, position=0, pad_id=2)
    assert not is_available()
    assert not accelerate_blocks()
    with caplog.at_level(logging.WARNING), open_store(layer) as store:
        assert store.report.backend == "portable"
        assert "not installed" in store.report.reason
        assert store.native is None
        out = outputs(world.format, 1)
        store.gather(np.array([7]), *out)
        np.testing.assert_array_equal(out[0], world.expected(np.array([7]))[0])
    assert "slow portable backend" in caplog.text


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "lib.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv(_native.LIBRARY_VARIABLE, str(broken))
    with pytest.raises(NativeError, match="cannot be used"):
        _native.library()
    monkeypatch.setenv(_native.LIBRARY_VARIABLE, "libm.so.6")
    with pytest.raises(NativeError, match="cannot be used"):
        _native.library()


def test_portable_on_request(world: World, caplog: pytest.LogCaptureFixture) -> None:
    places = [world.table, PackedLayer(world.pack_dir, LAYER), world.table.row_source()]
    with caplog.at_level(logging.WARNING):
        stores = open_stores(places, backend="portable")
    assert [store.report.is_checked for store in stores] == [False, True, False]
    assert {store.report.reason for store in stores} == {"as asked"}
    assert not caplog.records
    for store in stores:
        store.close()


def test_stores_share_a_reader_until_the_last_is_closed(world: World) -> None:
    first, second = open_stores([PackedLayer(world.pack_dir, 1), PackedLayer(world.pack_dir, 3)])
    assert first.native is not None
    assert second.native is not None
    assert first.native.reader is second.native.reader
    first.close()
    first.close()
    second.gather(np.array([1]), *outputs(world.format, 1))
    second.close()
    with pytest.raises(RowError, match="not open"):
        second.gather(np.array([1]), *outputs(world.format, 1))


def test_a_forked_child_is_told(world: World) -> None:
    with open_reader(world.place("pack")) as reader:
        store = NativeStore(reader, LAYER)
        gathered(store, np.array([1]))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                gathered(store, np.array([2]))
            except RowError as error:
                code = 0 if "parent" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gathered(store, np.array([3]))


@needs_uring
def test_registration_that_fails_is_no_failure(world: World) -> None:
    # What RLIMIT_MEMLOCK does not cover is read without registered buffers, and said. Root is not bound by it.
    program = """
        import os, resource, sys
        from pathlib import Path
        sys.path[:0] = sys.argv[2].split(os.pathsep)
        import numpy as np
        import numpy.random  # before the environment may become unreadable
        from deskfleet_engram import _native
        from deskfleet_engram.store import PackedLayer, open_store
        _native.library()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with open_store(PackedLayer(Path(sys.argv[1]), 1), backend="native") as store:
            out = np.empty((5, 256), np.uint8), np.empty((5, 8), np.uint8)
            store.gather(np.arange(5), *out)
            print(store.report.details["backend"], store.report.details["backend_detail"])
    """
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(world.pack_dir, Path(directory) / "pack")
        for path in Path(directory).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            f"{directory}/pack",
            os.pathsep.join(sys.path),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "buffers not registered (Cannot allocate memory)" in result.stdout
