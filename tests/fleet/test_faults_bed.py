"""What goes wrong while a fleet runs: each fault, what is said of it, how it ends, and that nothing of it stays.

Each line of docs/guides/fleet-faults.md is one of these tests. They share two nodes and, where a fault lets them, a
launch: what recovers from one fault serves for the next.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from bed import FABRIC, Bed, EngineImage
from bed.image import VENV
from bed.machine import Machine
from bed.node import ENGINE_FLAGS

pytestmark = pytest.mark.fleet

FILE = "/root/fleet.toml"
STATE = "/root/.local/state/deskfleet/bed"
IDLE = (*ENGINE_FLAGS, EngineImage().tag, "sleep", "1000000")
SUM = "17 + 25 ="
Answer = tuple[int, str]
"""HTTP's status with the text or the error's message; status 0 when the connection was refused or closed."""


# --- asking ---------------------------------------------------------------------------------------------


def fleet(made: Bed, verb: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`deskfleet fleet VERB` on the desk."""
    return made.desk.run(["deskfleet", "fleet", verb, "-f", FILE, *words], check=check, timeout_s=300)


def status(made: Bed) -> dict[str, Any]:
    ran = fleet(made, "status", "--json", check=False)
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told["exit_code"] == ran.returncode, ran.stderr
    return told


def record(made: Bed, machine: Machine | None = None) -> dict[str, Any]:
    """What the supervisor wrote last; nobody is asked."""
    path = (machine or made.desk).path(f"{STATE}/record.json")
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"launch_id": "", "phase": ""}
    return told


def ask(made: Bed, text: str = SUM, *, machine: Machine | None = None, **more: Any) -> Answer:
    """Ask the endpoint, as a client on the machine where deskfleet was typed."""
    messages = [{"role": "user", "content": text}]
    question = {"messages": messages, "temperature": 0, "chat_template_kwargs": {"thinking": False}}
    url, headers = "http://127.0.0.1:8000/v1/chat/completions", {"content-type": "application/json"}
    request = urllib.request.Request(
        url, json.dumps({"model": "pocket", "max_tokens": 24, **question, **more}).encode(), headers
    )
    with (machine or made.desk).network():
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return 200, json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["error"]["message"]
        except (urllib.error.URLError, ConnectionError) as error:
            return 0, str(error)


def is_right(answer: Answer) -> bool:
    return answer[0] == 200 and "42" in answer[1]


@contextmanager
def unanswered(made: Bed) -> Iterator[Future[Answer]]:
    """A question that takes minutes, under way."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, made, "Tell me a story.", max_tokens=7000, ignore_eos=True)
        time.sleep(1.0)
        assert not asked.done(), asked.result()
        yield asked


def eventually(question: Callable[[], bool], wait_s: float = 120.0) -> bool:
    deadline = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def comes_to(made: Bed, verdict: str, wait_s: float = 60.0) -> dict[str, Any]:
    """The first status with that verdict."""
    deadline = time.monotonic() + wait_s
    while (seen := status(made))["verdict"] != verdict:
        assert time.monotonic() < deadline, seen
    return seen


# --- what is left ---------------------------------------------------------------------------------------


def containers(made: Bed) -> dict[str, str]:
    """Every container with its state, on whatever node."""
    return {
        name: shown["State"]["Status"] for node in made.nodes for name, shown in node.containers().items()
    }


def is_idle(machine: Machine) -> bool:
    return machine.processes() == {}


def let_a_minute_pass(machine: Machine) -> None:
    """As far as a killed supervisor's ssh connections know: the next command ends them and removes what is left."""
    machine.run("touch -d '2 minutes ago' /tmp/deskfleet-ssh-*")


def files(machine: Machine) -> set[str]:
    """What lies there, without what is kept on purpose: the fleet's state, whose half files count, and caches."""
    found = machine.run("find /home /opt /root /srv /tmp /var/tmp -xdev").stdout.splitlines()
    kept = (f"{STATE}/", "/srv/cache/")
    return {path for path in found if not path.startswith(kept) or path.rpartition("/")[2].startswith(".")}


def only_this_launch_runs(made: Bed, launch: str) -> None:
    """One container a node, of that launch, and no rank of another."""
    for rank, node in enumerate(made.nodes):
        (shown,) = node.containers().values()
        assert shown["Name"] == f"/deskfleet-bed-{rank}"
        assert (shown["State"]["Status"], shown["Config"]["Labels"]["deskfleet.launch"]) == (
            "running",
            launch,
        )
        ranks = [command for command in node.processes().values() if "deskfleet rank" in command]
        assert len(ranks) == 1, ranks
        assert f"--launch {launch}" in ranks[0]


def serves_again(made: Bed, before: dict[str, Any], wait_s: float = 180.0) -> dict[str, Any]:
    """The record of the launch that the supervisor made of itself, once it serves. Of `before` nothing is left."""

    def is_new() -> bool:
        now = record(made)
        return bool(now["launch_id"] != before["launch_id"] and now["phase"] == "serving")

    assert eventually(is_new, wait_s), record(made)
    up = status(made)
    assert (up["verdict"], up["exit_code"], up["supervisor"]) == ("up", 0, before["pid"]), up
    assert is_right(ask(made))
    only_this_launch_runs(made, up["launch"]["launch_id"])
    assert up["launch"]["restart"] == before["restart"] + 1
    again: dict[str, Any] = up["launch"]
    return again


@pytest.fixture(scope="module")
def two(pair: Bed) -> Iterator[Bed]:
    """Two nodes, with restarts that come at once. In the end nothing that was not there before is on any machine."""
    restart = {"backoff_s": [1.0] * 10}
    pair.desk.write(FILE, pair.fleet_toml(checkpoint={"model": "pocket"}, available="4GiB", restart=restart))
    for machine in (pair.desk, *pair.nodes):
        machine.run(["mkdir", "-p", "/srv/cache", STATE])
    before = {machine.name: files(machine) for machine in (pair.desk, *pair.nodes)}
    yield pair
    fleet(pair, "stop")
    nothing_is_left(pair)
    assert {machine.name: files(machine) for machine in (pair.desk, *pair.nodes)} == before


def nothing_is_left(made: Bed) -> None:
    """Nothing runs anywhere, and nobody waits for anything."""
    assert containers(made) == {}
    for machine in (made.desk, *made.nodes):
        assert eventually(partial(is_idle, machine), 10.0), machine.processes()
    assert status(made)["verdict"] == "down"


@pytest.fixture
def stopped(two: Bed) -> Iterator[Bed]:
    """Nothing runs, before and after."""
    fleet(two, "stop")
    yield two
    two.nodes[1].mend()
    fleet(two, "stop")
    nothing_is_left(two)


@pytest.fixture
def serving(two: Bed) -> Iterator[Bed]:
    """It serves, before and after."""
    fleet(two, "serve", "--no-gates")
    assert is_right(ask(two))
    yield two
    for node in two.nodes:
        node.mend()
        node.mend(FABRIC)


# --- while it starts ------------------------------------------------------------------------------------


def start(made: Bed, phase: str, *words: str) -> subprocess.Popen[str]:
    """`serve` in a terminal of its own, once it has come to that phase."""
    before = record(made)["launch_id"]
    front = made.desk.start(["deskfleet", "fleet", "serve", "-f", FILE, *words])
    assert eventually(lambda: record(made)["launch_id"] != before and record(made)["phase"] == phase)
    return front


def test_two_launches_at_once_and_a_killed_terminal(stopped: Bed) -> None:
    front = start(stopped, "loading", "--no-gates")
    launch = record(stopped)
    second = fleet(stopped, "serve", check=False)
    assert second.returncode == 3
    seen = status(stopped)
    assert (seen["verdict"], seen["exit_code"]) == ("starting", 1)
    holder = f"the fleet bed is being changed: launch {launch['launch_id']}, process {launch['pid']}"
    assert holder in second.stderr
    assert record(stopped)["launch_id"] == launch["launch_id"]
    stopped.desk.signal("deskfleet fleet serve", "KILL")
    front.communicate(timeout=60)
    assert front.returncode == -9
    assert eventually(lambda: record(stopped)["phase"] == "serving"), record(stopped)
    up = status(stopped)
    assert (up["verdict"], up["launch"]["launch_id"]) == ("up", launch["launch_id"])
    assert is_right(ask(stopped))


def test_a_supervisor_that_is_killed_while_it_loads(stopped: Bed) -> None:
    front = start(stopped, "loading", "--no-gates")
    stopped.desk.run(["kill", "-KILL", str(record(stopped)["pid"])])
    said, _ = front.communicate(timeout=60)
    assert front.returncode == 3
    assert "the supervisor ended with -9 and said nothing of it" in said
    broken = status(stopped)
    assert (broken["verdict"], broken["exit_code"], broken["supervisor"]) == ("half-alive", 3, None)
    assert "ended without a word while loading" in broken["reasons"][0]
    let_a_minute_pass(stopped.desk)
    assert fleet(stopped, "stop").stderr.endswith("bed is stopped\n")


@pytest.mark.parametrize("fault", ["frozen", "cut off"])
def test_a_launch_that_loses_a_worker(stopped: Bed, fault: str) -> None:
    """It fails and is undone; what cannot be undone is named, and the next `stop` undoes it."""
    front, worker = start(stopped, "asking", "--gate", "counting", "--gate", "garble"), stopped.nodes[1]
    if fault == "frozen":
        worker.signal_container("deskfleet-bed-1", "STOP")
    else:
        worker.cut()
    said, _ = front.communicate(timeout=180)
    failed, down = record(stopped), status(stopped)
    assert front.returncode == failed["exit_code"] == 3, said
    assert (failed["phase"], failed["restart"]) == ("failed", 0)
    assert "rank 1" in failed["reason"]
    if fault == "frozen":
        assert "has been silent for" in failed["reason"]
        assert (down["verdict"], down["exit_code"]) == ("down", 1)
        return
    assert "what may still run: deskfleet-bed-1 on node1" in failed["reason"]
    assert (down["verdict"], down["exit_code"], set(down["unreachable"])) == ("unknown", 3, {"node1"})
    worker.mend()
    assert fleet(stopped, "stop").stderr.startswith("removed deskfleet-bed-1 on node1\n")


def test_containers_in_the_way(stopped: Bed) -> None:
    """An older launch's are removed, and that is said; other fleets' and other people's are not touched."""
    head, worker = stopped.nodes
    stale = worker.stale_container("bed", 1)
    other = worker.stale_container("other", 0)
    head.docker("run", "--detach", "--name", "deskfleet-bed-0", *IDLE)  # our name, and not our label
    before = status(stopped)
    assert (before["verdict"], before["exit_code"]) == ("half-alive", 3)
    assert f"containers without a supervisor: {stale} on node1 (running)" in before["reasons"]

    refused = fleet(stopped, "serve", "--no-gates", check=False)
    assert refused.returncode == 3
    assert f"removed {stale} on node1" in refused.stderr
    assert 'name "/deskfleet-bed-0" is already in use' in refused.stderr
    theirs = {"deskfleet-bed-0": "running", other: "running"}
    assert containers(stopped) == theirs
    assert status(stopped)["verdict"] == "down"
    fleet(stopped, "stop")
    assert containers(stopped) == theirs

    head.docker("rm", "--force", "deskfleet-bed-0")
    fleet(stopped, "serve", "--no-gates")
    assert is_right(ask(stopped))
    fleet(stopped, "stop")
    assert containers(stopped) == {other: "running"}
    worker.docker("rm", "--force", other)


# --- while it serves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank(serving: Bed, rank: int) -> None:
    before = record(serving)
    with unanswered(serving) as asked:
        serving.nodes[rank].signal_container(f"deskfleet-bed-{rank}", "KILL")
        again = serves_again(serving, before)
        assert asked.result(60)[0] != 200
    assert f"rank {rank} on node{rank}" in again["after"]
    assert f"the container deskfleet-bed-{rank} ended with 137" in again["after"]


@pytest.mark.parametrize("rank", [1, 0])
def test_a_frozen_rank(serving: Bed, rank: int) -> None:
    before = record(serving)
    with unanswered(serving) as asked:
        serving.nodes[rank].signal_container(f"deskfleet-bed-{rank}", "STOP")
        seen = comes_to(serving, "half-alive")
        assert (seen["exit_code"], seen["reasons"]) == (
            3,
            ["the endpoint: the server answered with status 503"],
        )
        assert ask(serving)[0] == 503
        again = serves_again(serving, before)
        assert asked.result(60)[0] != 200
    assert f"rank {rank} on node{rank} has been silent for" in again["after"]


def test_a_cut_cable_between_supervisor_and_node(serving: Bed) -> None:
    before = record(serving)
    with unanswered(serving) as asked:
        serving.nodes[1].cut()
        assert eventually(lambda: record(serving)["phase"] == "waiting"), record(serving)
        assert asked.result(60)[0] != 200
    seen = status(serving)
    assert (seen["verdict"], seen["exit_code"], set(seen["unreachable"])) == ("waiting", 3, {"node1"})
    assert "what may still run: deskfleet-bed-1 on node1" in seen["launch"]["reason"]
    assert ask(serving)[0] == 0
    # Nobody could tell it, and it has ended.
    assert eventually(lambda: containers(serving) == {"deskfleet-bed-1": "exited"}), containers(serving)
    serving.nodes[1].mend()
    again = serves_again(serving, before)
    assert again["after"].startswith(
        "rank 1 on node1 "
    )  # is silent, or cannot be reached: whoever sees it first


def test_a_slow_cable(serving: Bed) -> None:
    """Answers take longer and stay right. `status` does not tell, `doctor` does."""
    before = record(serving)
    serving.nodes[1].slow(FABRIC, delay_s=0.02)
    serving.nodes[1].slow(delay_s=0.1, loss=0.02)
    begin = time.monotonic()
    assert is_right(ask(serving))
    assert time.monotonic() - begin > 1.0
    seen = status(serving)
    assert (seen["verdict"], seen["exit_code"], seen["reasons"]) == ("up", 0, [])
    examined = json.loads(fleet(serving, "doctor", "--json", check=False).stdout)
    latency = [each for each in examined["findings"] if each["check"] == "latency"]
    assert [each["verdict"] for each in latency] == ["warn", "warn"], latency
    assert record(serving) == before
    assert is_right(ask(serving))


def test_a_node_is_rebooted(serving: Bed) -> None:
    before, node = record(serving), serving.nodes[1]
    with unanswered(serving) as asked:
        node.power_off()
        assert eventually(lambda: record(serving)["phase"] == "waiting"), record(serving)
        assert asked.result(60)[0] != 200
    seen = status(serving)
    assert (seen["verdict"], seen["exit_code"], set(seen["unreachable"])) == ("waiting", 3, {"node1"})
    node.power_on()
    again = serves_again(serving, before)
    assert "rank 1 on node1" in again["after"]


def test_a_killed_supervisor(serving: Bed) -> None:
    pid = record(serving)["pid"]
    with unanswered(serving) as asked:
        serving.desk.run(["kill", "-KILL", str(pid)])
        assert asked.result(60)[0] == 0
    assert ask(serving)[0] == 0
    broken = status(serving)
    assert (broken["verdict"], broken["exit_code"], broken["supervisor"]) == ("half-alive", 3, None)
    assert broken["reasons"][0] == f"the supervisor, process {pid}, ended without a word while serving"
    assert eventually(lambda: set(containers(serving).values()) == {"exited"}), containers(serving)
    let_a_minute_pass(serving.desk)
    again = fleet(serving, "restart", "--no-gates")
    assert serving.desk.run("ls -d /tmp/deskfleet-ssh-* | wc -l").stdout == "1\n"  # the new supervisor's
    for rank in range(2):
        assert f"removed deskfleet-bed-{rank} on node{rank}" in again.stderr
    assert is_right(ask(serving))
    only_this_launch_runs(serving, record(serving)["launch_id"])


def test_stop_without_a_node(serving: Bed) -> None:
    node = serving.nodes[1]
    node.stop_sshd()
    stopped = fleet(serving, "stop", check=False)
    assert stopped.returncode == 3
    assert "node1: rank 1 (deskfleet-bed-1) may still run (node node1 cannot be reached: " in stopped.stderr
    assert ask(serving)[0] == 0
    seen = status(serving)
    assert (seen["verdict"], seen["exit_code"], set(seen["unreachable"])) == ("unknown", 3, {"node1"})
    assert fleet(serving, "stop", check=False).returncode == 3
    node.start_sshd()
    assert fleet(serving, "stop").stderr == "removed deskfleet-bed-1 on node1\nbed is stopped\n"
    nothing_is_left(serving)


def test_a_cut_cable_between_ranks(serving: Bed) -> None:
    """Nothing moves any more, and nobody is gone: the health watch ends it after half a minute."""
    fleet(serving, "restart", "--no-gates")
    before = record(serving)
    with unanswered(serving) as asked:
        serving.nodes[1].cut(FABRIC)
        seen = comes_to(serving, "half-alive")
        assert (seen["exit_code"], seen["reasons"]) == (
            3,
            ["the endpoint: the server answered with status 503"],
        )
        assert asked.result(60) == (503, asked.result()[1])
        assert "the engine is stuck: nothing has moved for" in asked.result()[1]
    assert eventually(lambda: record(serving)["phase"] == "waiting", 120.0), record(serving)
    serving.nodes[1].mend(FABRIC)
    assert eventually(lambda: record(serving)["phase"] == "serving"), record(serving)
    assert is_right(ask(serving))
    assert record(serving)["launch_id"] != before["launch_id"]
    only_this_launch_runs(serving, record(serving)["launch_id"])


# --- the machine where it was typed ---------------------------------------------------------------------


def test_the_head_dies_with_the_supervisor(stopped: Bed) -> None:
    """Typed on the head. Nothing starts by itself, the worker's rank ends; `serve` begins anew."""
    head, worker = stopped.nodes
    program = str(VENV / "bin/deskfleet")

    def here(*words: str) -> subprocess.CompletedProcess[str]:
        return head.run([program, "fleet", *words, "-f", FILE], check=False, timeout_s=300)

    text = stopped.fleet_toml(head_is_local=True, checkpoint={"model": "pocket"}, available="4GiB")
    head.write(FILE, text)
    assert here("serve", "--no-gates").returncode == 0
    assert is_right(ask(stopped, machine=head))
    head.power_off()
    assert eventually(lambda: worker.containers()["deskfleet-bed-1"]["State"]["Status"] == "exited")
    head.power_on()
    assert containers(stopped) == {"deskfleet-bed-0": "exited", "deskfleet-bed-1": "exited"}
    broken = here("status", "--json")
    seen = json.loads(broken.stdout)
    assert (broken.returncode, seen["verdict"], seen["supervisor"]) == (3, "half-alive", None)
    assert seen["reasons"][0].endswith("ended without a word while serving")
    let_a_minute_pass(head)
    again = here("serve", "--no-gates")
    assert again.returncode == 0, again.stderr
    for rank in range(2):
        assert f"removed deskfleet-bed-{rank} on node{rank}" in again.stderr
    assert is_right(ask(stopped, machine=head))
    only_this_launch_runs(stopped, record(stopped, head)["launch_id"])
    assert here("stop").returncode == 0
    head.run(f"rm -r {FILE} {STATE}; mkdir {STATE}")
