"""The doctor: a sound fleet is green, one fault turns one check red, and the command over real sshd."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_sshd import SSHD, WHY_NOT, Sshd, ssh_wrapper
from recorded import IMAGE, Changes, facts_of

from deskfleet.fleet.checks import CHECKS, Finding
from deskfleet.fleet.checks.versions import known_bad
from deskfleet.fleet.doctor import examine
from deskfleet.fleet.engines.contract import ports_of
from deskfleet.fleet.facts import NodeFacts
from deskfleet.fleet.links import LinkMeasure
from deskfleet.fleet.planning import plan_fleet
from deskfleet.fleet.spec import FleetSource, read_source
from tests.cli.cli_process import Done, deskfleet

FLEET = f"""
name = "desk"
[paths]
checkpoint = "/models/v4.1"
engram = "/rows"
cache = "/cache"
[checkpoint]
model = "v4.1-flash"
[engine]
name = "vllm"
image = "{IMAGE}"
"""

NODE = """
[[nodes]]
name = "spark-{n}"
address = "spark-{n}"
kind = "spark"
fabric = ["10.0.22.{n}", "10.0.23.{n}"]
"""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> FleetSource:
    path = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    path.write_text(FLEET + "".join(NODE.format(n=n) for n in range(1, 5)))
    return read_source(path)


@cache
def sound(number: int) -> NodeFacts:
    return known_time(facts_of("spark", number))


def known_time(facts: NodeFacts, offset_s: float = 0.002) -> NodeFacts:
    return msgspec.structs.replace(facts, clock_offset_s=offset_s, clock_error_s=0.001)


def links(**faults: Any) -> tuple[LinkMeasure, ...]:
    """Every way between the four over both subnets; `faults` hold from spark-2 to spark-3."""
    found = []
    for a in range(1, 5):
        for b in range(1, 5):
            for subnet in (22, 23):
                values: dict[str, Any] = {"is_reached": True, "is_whole": True, "rtt_s": 1e-4, "how": "RDMA"}
                values |= {"bytes_per_s": 11.9e9, **(faults if (a, b) == (2, 3) else {})}
                ends = f"10.0.{subnet}.{a}", f"10.0.{subnet}.{b}"
                if a != b:
                    found.append(LinkMeasure(f"spark-{a}", f"spark-{b}", *ends, 9000, **values))
    return tuple(found)


def red(findings: tuple[Finding, ...]) -> dict[tuple[str, str], Finding]:
    return {(each.node, each.check): each for each in findings if each.verdict in ("warn", "fail")}


def test_a_sound_fleet_is_green(source: FleetSource) -> None:
    facts = {f"spark-{n}": sound(n) for n in range(1, 5)}
    plan = plan_fleet(source).best
    assert plan.fits
    findings = examine(source.spec, facts, plan, links=links())
    assert red(findings) == {}
    assert len(findings) == 4 * len(CHECKS)
    skipped = {each.check for each in findings if each.verdict == "skip"}
    assert skipped == {"ports"}, "a node on which nothing listens is asked for no port"
    said = {each.check: each.measured for each in findings if each.node == "spark-2"}
    assert said["gid"] == "NCCL_IB_HCA =rocep1s0f1:1,roceP2p1s0f1:1, NCCL_IB_GID_INDEX 3"
    assert said["topology"] == "switch"
    assert said["mtu"] == "9000 on both ends, and such packets pass whole"
    assert said["interface"].startswith("enp1s0f1np1 with 10.0.22.2; its name leads to 127.0.1.1")


def test_memory_is_held_against_what_a_rank_adds_to_the_system(source: FleetSource) -> None:
    """What the plan counts on as free is enough for the largest plan that fits, to the byte."""
    plan = plan_fleet(source).best
    budget, node = plan.budgets[1], plan.cluster.nodes[1]
    spare_bytes = budget.margin_bytes
    assert spare_bytes >= 0

    def verdict(available_bytes: int) -> str:
        memory = sound(2).memory
        assert memory is not None
        left = msgspec.structs.replace(memory, available_bytes=available_bytes)
        facts = {"spark-1": sound(1), "spark-2": msgspec.structs.replace(sound(2), memory=left)}
        found = examine(source.spec, facts, plan)
        return next(each.verdict for each in found if (each.node, each.check) == ("spark-2", "memory"))

    assert verdict(node.available_bytes - spare_bytes) == "pass"
    assert verdict(node.available_bytes - spare_bytes - 1) == "fail"


RDMA = "sys/class/infiniband"
NVIDIA_SMI = "0, NVIDIA GB10, {driver}, [N/A], [N/A], 12.1, {clock}, 3003, {mask}, 41, 9A.0B.12.00.01"
CONTAINER = '{{"Names":"{name}","Image":"{image}","State":"{state}","Status":"Up","Labels":"{labels}"}}'
IMAGE_JSON = (
    '{{"Id":"sha256:1d2","RepoDigests":["example/vllm@sha256:{digest}"],"RootFS":{{"Layers":["sha256:l1","sha256:{layer}"]}},'
    '"Architecture":"{arch}","Config":{{"Labels":{{"deskfleet.adapter":"{adapter}"}},"Env":["NCCL_VERSION={nccl}"]}}}}'
)
SAME = {"digest": "a" * 20, "layer": "l2", "arch": "arm64", "adapter": "0.1.0", "nccl": "2.30.4-1"}


def image(**values: str) -> Changes:
    return {"commands/image": IMAGE_JSON.format(**{**SAME, **values})}


def gpus(driver: str = "580.95.05", clock: str = "208", mask: str = "0x0000000000000001") -> Changes:
    return {"commands/gpus": NVIDIA_SMI.format(driver=driver, clock=clock, mask=mask)}


def addresses(*lines: str) -> Changes:
    """`ip -o address` with these on the fast devices."""
    lan = "2: enP7s7    inet 192.168.1.12/24 brd 192.168.1.255 scope global enP7s7"
    return {"commands/addresses": "\n".join([lan, *(f"3: {line} scope global" for line in lines)])}


FAULTS: Mapping[str, tuple[Changes, str, str]] = {
    "user and home": (
        {"commands/account": "bob", "commands/uid": "1001", "commands/home": "/data/my bob"},
        "account",
        "bob (uid 1001), home /data/my bob; on spark-1 nvidia",
    ),
    "architecture": (
        {"commands/arch": "x86_64", **image(arch="amd64")},
        "arch",
        "x86_64, and a spark is aarch64",
    ),
    "cache on NFS": (
        {"commands/paths": "cache\tdirectory\tyes\tnfs4 3000000000000"},
        "paths",
        "cache /cache is on nfs4",
    ),
    "rows of root": (
        {"commands/paths": "engram\tabsent\tno\text4 3000000000000"},
        "paths",
        "engram /rows cannot be written by nvidia",
    ),
    "no room for rows": (
        {"commands/paths": "engram\tdirectory\tyes\text4 40000000000"},
        "disk",
        "engram has 37.25 GiB free of 47",
    ),
    "rows that are there need no room": (
        {
            "commands/paths": "engram\tdirectory\tyes\text4 40000000000",
            "commands/engram_files": "50800000000\tengram-r1of4.bin",
        },
        "",
        "",
    ),
    "GPU runtime": (
        {"commands/docker": '{"ServerVersion":"28.3.3","Driver":"overlay2","Runtimes":{"runc":{}}}'},
        "gpu-runtime",
        "runtimes runc",
    ),
    "GPU by CDI": (
        {
            "commands/docker": '{"ServerVersion":"28.3.3","Driver":"overlay2","Runtimes":{"runc":{}},'
            '"DiscoveredDevices":[{"Source":"cdi","ID":"nvidia.com/gpu=all"}]}'
        },
        "",
        "",
    ),
    "image of the same tag with other layers": (
        image(layer="other", digest="b" * 20),
        "image",
        "other content than on spark-1: sha256:bbbbbbbbbbbb here, sha256:aaaaaaaaaaaa there",
    ),
    "image with another id and the same layers": ({}, "", ""),
    "image is absent": (
        {
            "commands/image": None,
            "commands/image.failed": f"[]\nError response from daemon: No such image: {IMAGE}",
        },
        "image",
        "is not here",
    ),
    "image of another architecture": (image(arch="amd64"), "image", "it is for amd64, and the node is arm64"),
    "adapter": (image(adapter="0.0.9"), "adapter", "adapter 0.0.9; on spark-1 adapter 0.1.0"),
    "leftover container": (
        {
            "commands/containers": CONTAINER.format(
                name="deskfleet-desk-1",
                image=IMAGE,
                state="exited",
                labels="deskfleet.fleet=desk,deskfleet.launch=7,deskfleet.rank=1",
            )
        },
        "leftovers",
        "deskfleet-desk-1 exited (launch 7)",
    ),
    "another fleet's engine": (
        {
            "commands/containers": CONTAINER.format(
                name="deskfleet-lab-0", image="x", state="running", labels="deskfleet.fleet=lab"
            )
        },
        "neighbours",
        "deskfleet-lab-0 (x)",
    ),
    "low memory": (
        {
            "proc/meminfo": "MemTotal: 127600000 kB\nMemFree: 9000000 kB\nMemAvailable: 60000000 kB\nShmem: 1 kB\n"
            "SwapTotal: 0 kB\nSwapFree: 0 kB\n"
        },
        "memory",
        "57.22 GiB available of 121.69 GiB, the plan needs",
    ),
    "earlyoom": (
        {
            "commands/units": "system\tearlyoom.service\tactive",
            "commands/processes": " 812 root /usr/bin/earlyoom -m 2",
        },
        "memory-guards",
        "/usr/bin/earlyoom -m 2",
    ),
    "limit above containers": (
        {"sys/fs/cgroup/system.slice/memory.max": "68719476736"},
        "cgroups",
        "/system.slice/memory.max 64.00 GiB",
    ),
    "limit of Docker's own service": (
        {"sys/fs/cgroup/system.slice/docker.service/memory.max": "1073741824"},
        "",
        "",
    ),
    "GPU busy": (
        {"commands/gpu_processes": "4711, [N/A], /usr/bin/python3 -m something"},
        "gpu",
        "busy: /usr/bin/python3 -m something (pid 4711)",
    ),
    "GPU slowed by heat": (gpus(mask="0x0000000000000048"), "gpu-clocks", "hardware thermal slowdown"),
    "clock latched": (gpus(clock="500", mask="0x0000000000000000"), "gpu-clocks", "not because it is idle"),
    "driver": (gpus(driver="580.82.09"), "driver", "580.82.09, but 580.95.05 on spark-1"),
    "unit": (
        {"commands/units": "user\tvllm-head.service\tactivating"},
        "units",
        "vllm-head.service (user)",
    ),
    "stale rank": (
        {"commands/processes": " 999 bob VLLM::Worker_TP1"},
        "stale-ranks",
        "999 bob VLLM::Worker_TP1",
    ),
    "kernel": ({"commands/kernel": "6.17.0-1014-nvidia"}, "kernel", "but 6.17.0-1032-nvidia on spark-1"),
    "firmware": (
        {
            f"{RDMA}/{name}/fw_ver": "28.40.1000"
            for name in ("rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1")
        },
        "firmware",
        "network card 28.40.1000",
    ),
    "NCCL": (image(nccl="2.29.2-1"), "nccl", "2.29.2, but 2.30.4 on spark-1"),
    "Xid": (
        {
            "commands/kernel_log": "2026-11-01T10:00:00 NVRM: Xid (PCI:000f:01:00): 79, GPU has fallen off the bus."
        },
        "kernel-log",
        "1 lines (GPU error)",
    ),
    "address gone": (
        addresses("enp1s0f1np1    inet 10.0.22.2/24", "enP2p1s0f1np1    inet 10.0.99.2/24"),
        "addresses pcie-halves",
        "10.0.23.2 is not on the node, which has 10.0.99.2 on enP2p1s0f1np1, 192.168.1.12 on enP7s7, 10.0.22.2",
    ),
    "address leased": (
        addresses("enp1s0f1np1    inet 10.0.22.2/24", "enP2p1s0f1np1    inet 10.0.23.2/24 dynamic"),
        "addresses",
        "10.0.23.2/24 is leased",
    ),
    "ports down": (
        {f"{RDMA}/{name}/ports/1/state": "1: DOWN" for name in ("rocep1s0f1", "roceP2p1s0f1")},
        "rdma",
        "rocep1s0f1:1: its state is DOWN",
    ),
    "only link-local": (
        {f"{RDMA}/{name}/ports/1/gids/{i}": None for name in ("rocep1s0f1", "roceP2p1s0f1") for i in (2, 3)},
        "gid",
        "only link-local ones, at 1",
    ),
    "indices differ": (
        {
            f"{RDMA}/rocep1s0f1/ports/1/{part.format(4)}": text
            for part, text in (
                ("gids/{}", "0000:0000:0000:0000:0000:ffff:0a00:1602"),
                ("gid_attrs/types/{}", "RoCE v2"),
                ("gid_attrs/ndevs/{}", "enp1s0f1np1"),
            )
        }
        | {f"{RDMA}/rocep1s0f1/ports/1/gids/3": None},
        "gid",
        "rocep1s0f1:1 has 4; roceP2p1s0f1:1 has 3",
    ),
    "link slow": (
        {"sys/class/net/enp1s0f1np1/speed": "100000"},
        "link-speed",
        "enp1s0f1np1 100000 Mb/s",
    ),
    "lanes lost": (
        {"sys/devices/pci0000:00/0000:01:00.1/current_link_width": "2"},
        "link-speed",
        "enp1s0f1np1 has 2 of 4 PCIe lanes",
    ),
    "half down": (
        {f"{RDMA}/roceP2p1s0f1/ports/1/state": "1: DOWN"},
        "pcie-halves",
        "roceP2p1s0f1 of the same socket is not: its state is DOWN",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_turns_one_check_red(source: FleetSource, fault: str) -> None:
    """The fault is on spark-2; with an empty expectation it is none."""
    changes, checks, told = FAULTS[fault]
    facts = {f"spark-{n}": sound(n) for n in range(1, 5)}
    facts["spark-2"] = known_time(facts_of("spark", 2, changes))
    findings = red(examine(source.spec, facts, plan_fleet(source).best, links=links()))
    assert set(findings) == {("spark-2", check) for check in checks.split()}, findings
    if checks:
        finding = findings["spark-2", checks.split()[0]]
        assert told in finding.measured
        assert finding.hint


@pytest.mark.parametrize(
    ("offset_s", "error_s", "verdict"),
    [
        (0.4, 0.001, None),
        (0.6, 0.2, None),
        (-0.6, 0.001, "warn"),
        (7.0, 0.01, "fail"),
        (-7.0, 0.01, "fail"),
        (9.0, 8.9, None),
    ],
)
def test_clock_skew(source: FleetSource, offset_s: float, error_s: float, verdict: str | None) -> None:
    """What the way there and back explains is no skew."""
    skewed = msgspec.structs.replace(sound(2), clock_offset_s=offset_s, clock_error_s=error_s)
    found = red(examine(source.spec, {"spark-1": sound(1), "spark-2": skewed}, links=links()))
    assert {key: each.verdict for key, each in found.items()} == (
        {("spark-2", "clock"): verdict} if verdict else {}
    )


def test_an_mtu_that_differs_is_told_at_both_ends(source: FleetSource) -> None:
    facts = {"spark-1": sound(1)}
    facts["spark-2"] = known_time(facts_of("spark", 2, {"sys/class/net/enp1s0f1np1/mtu": "1500"}))
    found = red(examine(source.spec, facts, links=links()))
    assert set(found) == {("spark-1", "mtu"), ("spark-2", "mtu")}
    assert found["spark-1", "mtu"].measured == "spark-1 has 9000, spark-2 has 1500 in 10.0.22.0/24"


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "told"),
    [
        ({"is_whole": False}, "mtu", "fail", "9000 bytes do not pass from spark-2 to spark-3"),
        (
            {"is_reached": False, "rtt_s": None},
            "latency",
            "fail",
            "no answer from 10.0.22.2 to 10.0.22.3 on spark-3",
        ),
        ({"rtt_s": 0.004}, "latency", "warn", "4.000 ms"),
        ({"bytes_per_s": 3.0e9}, "bandwidth", "fail", "3.00 GB/s to spark-3 over RDMA"),
        ({"bytes_per_s": 3.0e9, "how": "TCP"}, "", "", ""),
        ({"bytes_per_s": 0.2e9, "how": "TCP"}, "bandwidth", "fail", "1.00 is the least"),
        ({"bytes_per_s": None, "bandwidth_why": "neither is there"}, "", "", ""),
    ],
)
def test_what_links_measured(
    source: FleetSource, fault: dict[str, Any], check: str, verdict: str, told: str
) -> None:
    facts = {f"spark-{n}": sound(n) for n in range(1, 5)}
    found = red(examine(source.spec, facts, links=links(**fault)))
    assert {key: each.verdict for key, each in found.items()} == (
        {("spark-2", check): verdict} if check else {}
    )
    if check:
        assert told in found["spark-2", check].measured


def listening(port: int) -> str:
    """/proc/net/tcp with somebody on `port`, and a connection from it that is none."""
    return (
        "  sl  local_address rem_address   st\n"
        f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000\n"
        f"   1: 0100007F:{port + 1:04X} 0100007F:C350 01 00000000:00000000\n"
    )


@pytest.mark.parametrize("which", ["engine", "rendezvous"])
def test_a_port_that_is_taken(source: FleetSource, which: str) -> None:
    port = getattr(ports_of("desk"), which)
    taken = known_time(facts_of("spark", 1, {"proc/net/tcp": listening(port)}))
    found = red(examine(source.spec, {"spark-1": taken, "spark-2": sound(2)}, links=links()))
    assert {key: each.measured for key, each in found.items()} == {("spark-1", "ports"): f"{port} taken"}
    assert f"sport = :{port}" in str(found["spark-1", "ports"].hint)


def test_a_node_that_serves_is_not_called_busy(source: FleetSource) -> None:
    ours = CONTAINER.format(
        name="deskfleet-desk-0",
        image=IMAGE,
        state="running",
        labels="deskfleet.fleet=desk,deskfleet.launch=8",
    )
    serving: Changes = {
        "commands/containers": ours,
        "commands/gpu_processes": "4711, [N/A], VLLM::Worker_TP1",
        "commands/processes": " 4711 root VLLM::Worker_TP1",
        "proc/meminfo": "MemTotal: 127600000 kB\nMemFree: 1 kB\nMemAvailable: 9000000 kB\nShmem: 1 kB\n"
        "SwapTotal: 0 kB\nSwapFree: 0 kB\n",
        "proc/net/tcp": listening(ports_of("desk").engine),
    }
    facts = {f"spark-{n}": sound(n) for n in range(1, 5)}
    facts["spark-1"] = known_time(facts_of("spark", 1, serving))
    found = red(examine(source.spec, facts, plan_fleet(source).best, links=links()))
    assert set(found) == {("spark-1", "leftovers")}
    assert found["spark-1", "leftovers"].measured == "deskfleet-desk-0 running (launch 8)"


@pytest.mark.parametrize("bad", known_bad(), ids=lambda bad: f"{bad.what} {bad.version}")
def test_a_version_that_is_known_to_be_bad(source: FleetSource, bad: Any) -> None:
    assert bad.source.startswith("https://")
    planted: Mapping[str, Changes] = {
        "kernel": {"commands/kernel": f"{bad.version}-nvidia"},
        "nccl": image(nccl=f"{bad.version}-1"),
    }
    near: Mapping[str, Changes] = {
        "kernel": {"commands/kernel": f"{bad.version}0-nvidia"},
        "nccl": image(nccl=f"{bad.version}0-1"),
    }
    found = red(examine(source.spec, {"spark-1": known_time(facts_of("spark", 1, planted[bad.what]))}))
    assert set(found) == {("spark-1", "known-bad")}
    assert bad.fix in str(found["spark-1", "known-bad"].hint)
    assert red(examine(source.spec, {"spark-1": known_time(facts_of("spark", 1, near[bad.what]))})) == {}


def test_nothing_known_is_nothing_judged(source: FleetSource) -> None:
    """A node that tells nothing: only what must be there fails, the rest is skipped with the reason."""
    empty = facts_of("spark", 1, {"commands/*": None, "proc/*": None, "sys/*": None, "etc/*": None})
    findings = examine(source.spec, {"spark-1": empty})
    assert {each.check for each in findings if each.verdict == "fail"} == {"docker", "gpu", "rdma"}
    assert {each.check for each in findings if each.verdict == "warn"} == set()
    assert all(
        "unknown" in each.measured
        for each in findings
        if each.check in ("memory", "ports", "arch", "addresses")
    )


# --- the command


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Sshd, Sshd]]:
    servers = Sshd(tmp_path / "one"), Sshd(tmp_path / "two")
    yield servers
    for server in servers:
        server.stop()


def doctor(tmp_path: Path, servers: tuple[Sshd, ...], *words: str) -> Done:
    toml = FLEET.replace("/models", str(tmp_path / "models")).replace("/rows", str(tmp_path / "rows"))
    for index, server in enumerate(servers, start=1):
        toml += (
            f'[[nodes]]\nname = "n{index}"\naddress = "127.0.0.1"\nport = {server.port}\nkind = "spark"\n'
            f'identity = "{server.identity}"\nfabric = ["10.255.255.{index}"]\n'
        )
    (tmp_path / "fleet.toml").write_text(toml)
    path = ssh_wrapper(tmp_path / "bin", *servers)
    return deskfleet(
        "fleet", "doctor", "--file", str(tmp_path / "fleet.toml"), *words, PATH=path, COLUMNS="200"
    )


@pytest.mark.skipif(SSHD is None, reason=WHY_NOT)
def test_the_command_over_ssh(tmp_path: Path, two: tuple[Sshd, Sshd]) -> None:
    ran = doctor(tmp_path, two, "--json")
    assert ran.code == 1, ran.err  # this machine is no pair of Sparks
    told = json.loads(ran.out)
    assert told["exit_code"] == 1
    assert told["unreachable"] == {}
    verdicts = [each["verdict"] for each in told["findings"]]
    assert verdicts == sorted(verdicts, key=("fail", "warn", "skip", "pass").index), "the worst first"
    found = {(each["node"], each["check"]): each for each in told["findings"]}
    assert len(found) == 2 * len(CHECKS) + 1
    assert "8000" in found["this machine", "ports"]["measured"], "no node is the machine where this is typed"
    for node in ("n1", "n2"):
        assert found[node, "ssh"]["verdict"] == "pass"
        assert found[node, "clock"]["verdict"] == "pass"
        assert found[node, "addresses"]["verdict"] == "fail"
        assert found[node, "topology"]["verdict"] == "fail"

    two[1].stop()
    ran = doctor(tmp_path, two)
    assert ran.code == 3
    lines = ran.out.splitlines()
    assert lines[2].split()[:3] == ["fail", "n2", "ssh"], ran.out
    assert "nothing listens there" in lines[2]
    assert "hint: start sshd on the node" in lines[3]
    assert "1 of the nodes not reached" in lines[-1]
    assert any(line.split()[:3] == ["pass", "n1", "ssh"] for line in lines)

    ran = doctor(tmp_path, two, "--dry-run")
    assert ran.code == 0
    assert f"-p {two[0].port}" in ran.out
    assert "# What a node is and has, read only" in ran.out
