"""The probe: the real script on this machine, on a recorded tree, and on a tree in which nothing can be read."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from recorded import facts_of

from deskfleet.errors import DeskfleetError
from deskfleet.fleet.facts import NodeFacts, parse_facts
from deskfleet.fleet.probe import probe, read_script
from deskfleet.fleet.remote import Remote
from deskfleet.fleet.spec import LOCAL, NodePaths, NodeSpec

BARE = (
    "bash",
    "cat",
    "cut",
    "date",
    "df",
    "dirname",
    "head",
    "id",
    "printenv",
    "readlink",
    "sed",
    "sort",
    "tail",
)


def here(tmp_path: Path) -> NodeSpec:
    paths = NodePaths(
        str(tmp_path / "model"), str(tmp_path / "no" / "rows"), str(tmp_path / 'it\'s "cache" ü')
    )
    return NodeSpec("here", LOCAL, None, None, None, ("127.0.0.1",), "local", None, paths)


async def test_this_machine(tmp_path: Path) -> None:
    node = here(tmp_path)
    Path(node.paths.checkpoint).mkdir()
    Path(node.paths.cache).mkdir()
    (Path(node.paths.checkpoint) / 'a b\\"ü.safetensors').write_bytes(b"x" * 1234)
    before = sorted(tmp_path.rglob("*"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        begin = time.monotonic()
        facts = await probe(Remote(node))
        elapsed_s = time.monotonic() - begin
        assert facts.listening is not None
        assert listener.getsockname()[1] in facts.listening
    assert elapsed_s < 10  # it is a fraction of a second; a busy machine may take longer
    assert (facts.arch, facts.kernel, facts.hostname) == (
        platform.machine(),
        platform.release(),
        platform.node(),
    )
    assert (facts.uid, facts.home) == (os.getuid(), os.environ["HOME"])
    assert facts.memory is not None
    assert facts.memory.total_bytes == psutil.virtual_memory().total
    checkpoint, engram, cache = (facts.directory(role) for role in ("checkpoint", "engram", "cache"))
    assert checkpoint is not None
    assert engram is not None
    assert cache is not None
    assert checkpoint.files == {'a b\\"ü.safetensors': 1234}
    assert (engram.kind, engram.is_writable, engram.files) == ("absent", True, None)
    assert cache.kind == "directory"
    assert abs(checkpoint.free_bytes - psutil.disk_usage(str(tmp_path)).free) < 1 << 30
    assert facts.clock_offset_s is not None
    assert facts.clock_error_s is not None
    assert abs(facts.clock_offset_s) <= facts.clock_error_s + 0.01
    assert {device.name for device in facts.net} == set(os.listdir("/sys/class/net"))
    assert sorted(tmp_path.rglob("*")) == before, "the probe only reads"
    assert msgspec.json.decode(msgspec.json.encode(facts), type=NodeFacts) == facts


async def test_engines_are_seen_and_those_who_look_for_them_are_not(tmp_path: Path) -> None:
    script = 'exec -a "$1" sleep 60'
    titles = (
        "VLLM::Worker_TP1 of a test",
        "timeout 5 systemctl list-units sglang* earlyoom*",
        "less earlyoom.conf",
    )
    started = [await asyncio.create_subprocess_exec("bash", "-c", script, "bash", title) for title in titles]
    try:
        async with asyncio.timeout(10):
            while not all(psutil.Process(each.pid).name() == "sleep" for each in started):
                await asyncio.sleep(0.01)
        facts = await probe(Remote(here(tmp_path)))
    finally:
        for each in started:
            each.kill()
            await each.wait()
    assert facts.processes is not None
    own = {str(each.pid) for each in started}
    seen = [line.split(None, 2)[2] for line in facts.processes if line.split()[0] in own]
    assert seen == ["VLLM::Worker_TP1 of a test 60"]


def test_a_recorded_spark() -> None:
    facts = facts_of("spark", 2)
    assert facts.unknown == {}
    assert (facts.hostname, facts.product, facts.user) == ("spark-2", "NVIDIA DGX Spark", "nvidia")
    assert facts.gpus is not None
    gpu = facts.gpus[0]
    assert (gpu.name, gpu.driver, gpu.memory_bytes, gpu.throttle_mask) == (
        "NVIDIA GB10",
        "580.95.05",
        None,
        1,
    )
    assert facts.image is not None
    assert facts.image.env["NCCL_VERSION"] == "2.30.4-1"
    device = facts.device_of("10.0.22.2")
    assert device is not None
    assert (device.name, device.mtu, device.speed_mbps, device.lanes) == ("enp1s0f1np1", 9000, 200000, 4)
    assert [each.name for each in facts.rdma] == ["roceP2p1s0f0", "roceP2p1s0f1", "rocep1s0f0", "rocep1s0f1"]
    assert facts.rdma[3].pci == "0000:01:00.1"
    gid = facts.rdma[3].ports[0].gids[3]
    assert (str(gid.ipv4), gid.type, gid.net_device) == ("10.0.22.2", "RoCE v2", "enp1s0f1np1")


def test_what_cannot_be_read_is_unknown_with_the_reason() -> None:
    changes: dict[str, str | None] = {
        "commands/*": None,
        "proc/*": None,
        "sys/*": None,
        "commands/docker.failed": "permission denied while trying to connect to the docker API\n",
        "commands/gpus": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "commands/uid": "not a number",
    }
    facts = facts_of("spark", 1, changes)
    assert facts.unknown["docker"] == "permission denied while trying to connect to the docker API"
    assert facts.unknown["containers"] == "it was not recorded"
    assert "No such file" in facts.unknown["meminfo"]
    assert facts.unknown["uid"].startswith("makes no sense: not a number")
    assert (facts.docker, facts.containers, facts.memory, facts.listening, facts.uid) == (None,) * 5
    assert facts.gpus == ()
    assert facts.rdma == ()
    assert facts.net == ()


def test_texts_of_any_kind_make_one_document() -> None:
    odd = 'tab\there "quoted" back\\slash \x07bell\r\nsecond & line'
    facts = facts_of("spark", 1, {"commands/hostname": odd, "commands/kernel_log": "NVRM: é\n\n  spaces\n"})
    assert facts.hostname == odd.replace("\x07", " ").replace("\r\n", "\r\n").strip()
    assert facts.kernel_log == ("NVRM: é", "  spaces")


@pytest.mark.parametrize("text", ["", "Welcome to DGX!\n{}", "{}", "[]", '{"format":"9"}'])
def test_what_is_no_document_is_told(text: str) -> None:
    with pytest.raises(DeskfleetError, match="node n: what the probe printed is"):
        parse_facts(text, "n")


def test_a_shell_that_lacks_every_program_still_tells_what_files_say(tmp_path: Path) -> None:
    """No docker, no nvidia-smi, no ip, no systemctl: a bare bash with coreutils."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in (*BARE, "timeout", "tr", "uname"):
        (tools / name).symlink_to(
            next(Path(d) / name for d in ("/usr/bin", "/bin") if (Path(d) / name).exists())
        )

    async def told() -> str:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", read_script("probe.sh"), "probe", "", "image", str(tmp_path), "", ""),
            env={"PATH": str(tools), "HOME": "/root"},
            stdout=asyncio.subprocess.PIPE,
        )
        stdout, _ = await process.communicate()
        return stdout.decode()

    text = asyncio.run(told())
    json.loads(text)
    facts = parse_facts(text, "bare")
    assert facts.memory is not None
    assert facts.arch == platform.machine()
    assert facts.unknown["docker"] == "there is no program docker"
    assert facts.unknown["addresses"] == "there is no program ip"
