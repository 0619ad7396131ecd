"""The bed itself: nodes are apart from each other and from this machine, faults are real, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from bed import FABRIC, Bed, EngineImage, NodeSetup, bed, leftovers, missing, sweep
from bed.node import ENGINE_FLAGS

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
OTHER = EngineImage(variant="other")
# One rank of an all-reduce over the fast network, as the engine's ranks make one.
REDUCE = """
import sys, torch, torch.distributed as d
rank, address = int(sys.argv[1]), sys.argv[2]
d.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2)
x = torch.full((1 << 16,), float(rank + 1)); d.all_reduce(x); print(x.sum().item()); d.destroy_process_group()
"""
HOLD = """
import sys, time; sys.path.insert(0, sys.argv[1])
from bed import bed
with bed(2) as made:
    made.head.stale_container("bed", 0)
    print(made.name, made.head.pid, flush=True); time.sleep(600)
"""


@pytest.fixture(scope="module")
def uneven() -> Iterator[Bed]:
    """Three nodes; the second has a user, a home, paths and an image of its own."""
    alice = NodeSetup("alice", "/data/people/alice", (OTHER,), cache="/data/with space/cache")
    with bed(3, setups=[NodeSetup(), alice], nfs=True) as made:
        yield made


def eventually(question: Callable[[], bool], wait_s: float = 10.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def pings(fleet: Bed, target: str, *words: str) -> str:
    """What ping says on the desk, whether it was answered or not."""
    return fleet.desk.run(["ping", "-n", "-c1", "-W1", *words, target], check=False).stdout


def fastest_s(fleet: Bed, target: str) -> float:
    """The shortest way there and back of a few packets, which a busy machine does not lengthen."""
    said = pings(fleet, target, "-c5", "-i0.1")
    return min(float(time_ms) for time_ms in re.findall(r"time=([\d.]+) ms", said)) / 1e3


def test_the_desk_reaches_every_node_as_its_user(uneven: Bed) -> None:
    for node in uneven.nodes:
        said = uneven.desk.run(
            ["ssh", "-o", "BatchMode=yes", node.name, "hostname; whoami; echo ~; docker ps -q | wc -l"]
        )
        assert said.stdout.split() == [node.name, node.setup.user, node.home, "0"]
    # Programs of this machine reach them too, within the desk's network and nowhere else.
    config = uneven.head.hub.directory / "ssh_config"
    config.write_text(uneven.ssh_config())
    command = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", "node2", "hostname"]
    with uneven.desk.network():
        assert subprocess.check_output(command, text=True) == "node2\n"
    assert subprocess.run(command, capture_output=True).returncode == 255


def test_nodes_see_each_other_on_both_networks(uneven: Bed) -> None:
    for node in uneven.nodes:
        for other in uneven.nodes:
            node.run(["ping", "-c1", "-W1", other.name])
            # A whole jumbo frame, not cut into pieces.
            node.run(["ping", "-c1", "-W1", "-M", "do", "-s", "8900", other.address(FABRIC)])


def test_what_a_node_writes_stays_there(pair: Bed) -> None:
    name = f"written-{os.getpid()}"
    places = [
        f"/{place}/{name}"
        for place in ("root", "home", "srv", "tmp", "run", "etc", "usr/local", "dev/shm", "opt")
    ]
    pair.head.run(["touch", *places])
    pair.head.run(["ls", *places])
    for place in places:
        assert not pair.nodes[1].path(place).exists()
        assert not Path(place).exists()
    assert pair.head.run(["touch", str(ROOT / name)], check=False).returncode != 0


def test_containers_run_deskfleet_from_one_image(pair: Bed) -> None:
    for node in pair.nodes:
        said = node.engine("sh", "-c", "deskfleet --version; hostname; ls /srv").stdout.split()
        assert said[0] == "deskfleet"
        assert said[2:] == [node.name]
        assert (
            node.docker("image", "inspect", "--format", "{{.Id}}", EngineImage().tag).stdout.strip()
            == EngineImage().id
        )


def test_a_node_may_have_another_image(uneven: Bed) -> None:
    ids = [node.docker("images", "--no-trunc", "--quiet").stdout.strip() for node in uneven.nodes]
    assert ids == [EngineImage().id, OTHER.id, EngineImage().id]
    assert EngineImage().id != OTHER.id


def test_ranks_of_two_nodes_meet_on_the_fabric(pair: Bed) -> None:
    def rank(number: int) -> str:
        address = pair.head.address(FABRIC)
        return (
            pair.nodes[number]
            .docker(
                *(
                    "run",
                    "--rm",
                    "--env",
                    "GLOO_SOCKET_IFNAME=fab0",
                    "--env",
                    "OMP_NUM_THREADS=1",
                    *ENGINE_FLAGS,
                ),
                *(EngineImage().tag, "python", "-c", REDUCE, str(number), address),
                timeout_s=120,
            )
            .stdout
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [f"{3.0 * (1 << 16)}\n"] * 2


def test_a_server_of_the_test_listens_on_the_desk(pair: Bed) -> None:
    with pair.desk.network():
        server = socket.create_server((pair.desk.address(), 8080))

    def answer() -> None:
        with server, server.accept()[0] as client:
            client.sendall(b"hello")

    thread = threading.Thread(target=answer)
    thread.start()
    said = pair.head.run(f"exec 3<>/dev/tcp/{pair.desk.address()}/8080; cat <&3").stdout
    thread.join(10)
    assert said == "hello"


def test_a_cut_cable_is_seen_and_mended(pair: Bed) -> None:
    node = pair.nodes[1]
    node.cut()
    assert "0 received" in pings(pair, "node1")
    assert node.run("cat /sys/class/net/eth0/carrier").stdout == "0\n"
    assert node.run("cat /sys/class/net/fab0/carrier").stdout == "1\n"
    node.mend()
    assert eventually(lambda: "1 received" in pings(pair, "node1"))


def test_a_slow_cable_delays_loses_and_narrows(pair: Bed) -> None:
    node = pair.nodes[1]
    assert fastest_s(pair, "node1") < 0.1
    node.slow(delay_s=0.1)
    assert 0.2 <= fastest_s(pair, "node1") < 0.3  # once each way
    node.slow(loss=1.0)
    assert "0 received" in pings(pair, "node1")
    # Large packets pass too, whatever the sender left to its card.
    node.slow(bytes_per_s=5e5)
    begin = time.monotonic()
    said = pair.desk.run(["ssh", "node1", "head -c 1000000 /dev/zero"]).stdout
    assert len(said) == 1_000_000
    assert 1.9 <= time.monotonic() - begin < 20
    node.mend()
    assert fastest_s(pair, "node1") < 0.1


def test_a_node_refuses_the_key_or_does_not_listen(pair: Bed) -> None:
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", "node1", "true"]
    node = pair.nodes[1]
    node.refuse_key()
    assert "Permission denied" in pair.desk.run(command, check=False).stderr
    node.accept_key()
    pair.desk.run(command)
    node.stop_sshd()
    assert "Connection refused" in pair.desk.run(command, check=False).stderr
    node.start_sshd()
    pair.desk.run(command)


def test_a_clock_is_skewed_over_ssh(pair: Bed) -> None:
    pair.nodes[1].skew_clock(-3600)
    for words, scale in (("+%s", 1), ("+%s%N", 10**9), ("-u +%s%3N", 10**3)):
        shown = int(pair.desk.run(["ssh", "node1", f"date {words}"]).stdout) / scale
        assert -3605 < shown - time.time() < -3595
    pair.nodes[1].skew_clock(0)
    assert abs(int(pair.desk.run(["ssh", "node1", "date +%s"]).stdout) - time.time()) < 5


def test_a_node_shows_the_memory_that_it_is_told_to(pair: Bed) -> None:
    node = pair.nodes[1]
    reading = ["ssh", "node1", "grep -E '^(MemAvailable|MemFree):' /proc/meminfo | tr -s ' '"]
    for available_gib in (7, 2):
        node.show_memory(available_gib << 30, 1 << 30)
        shown = pair.desk.run(reading).stdout.splitlines()
        assert shown == [f"MemFree: {1 << 20} kB", f"MemAvailable: {available_gib << 20} kB"]
    node.show_true_memory()
    total = re.search(r"MemTotal: .*", Path("/proc/meminfo").read_text())
    assert total is not None
    assert total[0] in node.run(["cat", "/proc/meminfo"]).stdout


def test_a_disk_is_full_for_containers_too(pair: Bed) -> None:
    node = pair.head
    node.limit_disk("/srv/small", 1 << 20)
    node.fill_disk("/srv/small", free_bytes=1 << 16)
    write = ["sh", "-c", "head -c 200000 /dev/zero >/srv/small/rows"]
    said = node.docker(
        "run", "--rm", "-v", "/srv/small:/srv/small", *ENGINE_FLAGS, EngineImage().tag, *write, check=False
    )
    assert said.returncode != 0
    assert "No space left on device" in said.stderr
    assert node.path("/srv/small/rows").stat().st_size == 1 << 16
    node.run(["umount", "/srv/small"])


def test_a_port_is_taken_for_a_while(pair: Bed) -> None:
    with pair.head.taken_port(9911):
        with pytest.raises(RuntimeError, match="Address already in use"), pair.head.taken_port(9911):
            pass
        with pair.nodes[1].taken_port(9911):
            pass
    with pair.head.taken_port(9911):
        pass


def test_containers_freeze_die_and_stay(pair: Bed) -> None:
    node = pair.head
    name = node.stale_container("bed", 0)
    labels = node.containers()[name]["Config"]["Labels"]
    assert {key: labels[key] for key in labels if key.startswith("deskfleet.") and "bed." not in key} == {
        "deskfleet.fleet": "bed",
        "deskfleet.launch": "older-launch",
        "deskfleet.rank": "0",
    }
    state = f"ps -o stat= -p {node.containers()[name]['State']['Pid']}"
    node.signal_container(name, "STOP")
    assert eventually(lambda: node.run(state).stdout.startswith("T"))
    node.signal_container(name, "CONT")
    assert eventually(lambda: node.run(state).stdout.startswith("S"))
    node.signal_container(name, "KILL")
    assert eventually(lambda: node.containers()[name]["State"]["ExitCode"] == 137)
    node.docker("rm", name)
    assert eventually(lambda: not node.processes())


def test_docker_dies_and_comes_back(pair: Bed) -> None:
    node = pair.nodes[1]
    name = node.stale_container("bed", 1)
    node.stop_docker()
    assert node.docker("ps", check=False).returncode != 0
    node.start_docker()
    assert name in node.containers()
    node.docker("rm", "--force", name)
    assert eventually(lambda: not node.processes())


def test_a_reboot_keeps_the_disk_and_nothing_else(pair: Bed) -> None:
    node = pair.nodes[1]
    name = node.stale_container("bed", 1)
    boot = node.path("/proc/sys/kernel/random/boot_id").read_text()
    assert boot != pair.head.path("/proc/sys/kernel/random/boot_id").read_text()
    node.run("echo kept >/srv/file; touch /run/lost /dev/shm/lost")
    node.start(["sleep", "1000"])
    assert "1 received" in pings(pair, "node1")
    node.power_off()
    assert "0 received" in pings(pair, "node1")
    node.power_on()
    assert pair.desk.run(["ssh", "node1", "cat /srv/file"]).stdout == "kept\n"
    assert node.path("/proc/sys/kernel/random/boot_id").read_text() != boot
    assert not node.path("/run/lost").exists()
    assert not node.path("/dev/shm/lost").exists()
    assert not node.processes()
    assert not node.containers()[name]["State"]["Running"]
    pair.head.run(["ping", "-c1", "-W1", node.address(FABRIC)])
    node.docker("rm", name)


def test_nfs_reads_what_is_exported_and_hangs_with_the_cable(uneven: Bed) -> None:
    server, _, client = uneven.nodes
    server.write("/srv/with space/shard", "weights")
    mounting = ["mount", "-t", "nfs4", "-o", "ro,hard,noatime,nconnect=8", "node0:/srv/with space", "/mnt"]
    denied = client.run(mounting, check=False)
    assert denied.returncode == 32
    assert "access denied by server" in denied.stderr
    server.run(["service", "nfs-kernel-server", "start"])
    client.run("exec 3<>/dev/tcp/node0/2049")
    server.run(["exportfs", "-o", "rw", "10.9.9.0/24:/srv"])
    assert client.run(mounting, check=False).returncode == 32
    server.write("/etc/exports", f"/srv/with\\040space {client.address()}(ro,sync) 10.9.9.0/24(rw)\n")
    server.run(["exportfs", "-ra"])
    client.run(mounting)
    assert client.run(["cat", "/mnt/shard"]).stdout == "weights"
    shown = client.run(["df", "--output=fstype,source", "/mnt"]).stdout.splitlines()[1]
    assert shown.split() == ["nfs4", "node0:/srv/with", "space"]
    assert "Read-only" in client.run(["touch", "/mnt/new"], check=False).stderr
    inside = client.docker(
        "run", "--rm", "-v", "/mnt:/model:ro", *ENGINE_FLAGS, EngineImage().tag, "cat", "/model/shard"
    )
    assert inside.stdout == "weights"
    server.cut()
    reading = client.start("sleep 2; cat /mnt/shard")
    with pytest.raises(subprocess.TimeoutExpired):
        reading.wait(3)
    server.mend()
    assert reading.communicate(timeout=30)[0] == "weights"
    client.run(["umount", "/mnt"])
    assert eventually(lambda: not client.processes())


def test_a_fleet_file_names_nodes_as_they_are(uneven: Bed) -> None:
    text = uneven.fleet_toml(checkpoint={"model": "pocket"}, engine={"env": {"A": 'say "hi"'}}, share="copy")
    read = tomllib.loads(text)
    assert read["engine"]["env"] == {"A": 'say "hi"'}
    assert read["engine"]["image"] == EngineImage().id
    assert [node["fabric"] for node in read["nodes"]] == [["10.78.0.11"], ["10.78.0.12"], ["10.78.0.13"]]
    assert read["nodes"][1]["paths"]["cache"] == "/data/with space/cache"


def test_closing_leaves_nothing() -> None:
    with bed(2, fabric=False) as made:
        made.head.stale_container("bed", 0)
        made.head.slow(delay_s=0.01)
        made.desk.start(["sleep", "1000"])
        pids = everything_inside(made.head.pid) | everything_inside(made.desk.pid)
        assert len(pids) > 5
        assert leftovers(made.name)
    assert leftovers(made.name) == ()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_test_run_is_swept_by_the_next() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name, head_pid = process.stdout.readline().split()
    pids = everything_inside(int(head_pid))
    assert len(pids) > 4
    sweep()
    assert Path(f"/proc/{head_pid}").exists()  # somebody's bed is left alone
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    # The kernel ends the processes, and with them mounts and interfaces, before anybody sweeps.
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert leftovers(name)
    sweep()
    assert leftovers(name) == ()


def everything_inside(pid: int) -> set[int]:
    """Every process on the network of that process."""
    network = os.stat(f"/proc/{pid}/ns/net").st_ino
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.stat(place / "ns" / "net").st_ino == network:
                found.add(int(place.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def test_the_lane_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == ()
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "tools/fleet_bed.sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "root" in done.stderr
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [said.split(":")[0] for said in missing()] == ["root"]
    with pytest.raises(RuntimeError, match="sudo make test-fleet"), bed(1):
        pass
    assert json.dumps(missing())
