"""A fleet that has served and fails, or runs out of memory: what its supervisor does until there is no use in it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from bed import Bed

from deskfleet.fleet.memory import floors_of_nodes
from deskfleet.fleet.planning import machines
from deskfleet.fleet.spec import read_source

pytestmark = pytest.mark.fleet

FILE = "/root/fleet.toml"
STATE = "/root/.local/state/deskfleet/bed"
BACKOFF_S = [1.0, 2.0]
AVAILABLE_BYTES = psutil.virtual_memory().total * 7 // 8


def fleet(made: Bed, verb: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`deskfleet fleet VERB` on the desk."""
    return made.desk.run(["deskfleet", "fleet", verb, "-f", FILE, *words], check=check, timeout_s=180)


def status(made: Bed) -> dict[str, Any]:
    ran = fleet(made, "status", "--json", check=False)
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told["exit_code"] == ran.returncode, ran.stderr
    return told


def record(made: Bed) -> dict[str, Any]:
    """What the supervisor wrote last; nobody is asked."""
    told: dict[str, Any] = json.loads(made.desk.path(f"{STATE}/record.json").read_text())
    return told


def launches(made: Bed) -> list[str]:
    return sorted(path.name for path in made.desk.path(f"{STATE}/launches").iterdir())


def events(made: Bed, launch: str) -> list[dict[str, Any]]:
    text = made.desk.path(f"{STATE}/launches/{launch}/events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def eventually(question: Callable[[], bool], wait_s: float = 90.0) -> bool:
    deadline = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def containers(made: Bed) -> dict[str, str]:
    """Every container with its state, on whatever node."""
    return {
        name: shown["State"]["Status"] for node in made.nodes for name, shown in node.containers().items()
    }


def question(prompt: str = "2 + 3 =") -> list[str]:
    body = json.dumps({"model": "pocket", "prompt": prompt, "max_tokens": 4})
    words = ["curl", "-s", "-H", "content-type: application/json", "-d", body]
    return [*words, "http://127.0.0.1:8000/v1/completions"]


def answers(made: Bed) -> str:
    """What the endpoint says to a question, as a client on the desk."""
    return made.desk.run(question(), check=False).stdout


@pytest.fixture
def two(pair: Bed) -> Iterator[Bed]:
    """Two nodes and nothing that runs on them, before and after. Restarts come soon."""
    restart = {"backoff_s": BACKOFF_S}
    text = pair.fleet_toml(checkpoint={"model": "pocket"}, available=AVAILABLE_BYTES, restart=restart)
    pair.desk.write(FILE, text)
    yield pair
    for node in pair.nodes:
        node.mend()
    fleet(pair, "stop", check=False)
    assert containers(pair) == {}


def test_a_killed_rank_and_the_fleet_serves_again(two: Bed) -> None:
    fleet(two, "serve", "--no-gates")
    first = record(two)
    assert "choices" in json.loads(answers(two))
    two.nodes[1].signal_container("deskfleet-bed-1", "KILL")
    assert eventually(lambda: record(two)["launch_id"] != first["launch_id"])
    assert eventually(lambda: record(two)["phase"] == "serving"), record(two)

    up = status(two)
    assert (up["verdict"], up["endpoint"], up["supervisor"]) == ("up", "healthy", first["pid"])
    assert {rank["launch_id"] for rank in up["ranks"]} == {up["launch"]["launch_id"]}
    assert up["launch"]["restart"] == 1
    assert "the container deskfleet-bed-1 ended with 137" in up["launch"]["after"]
    assert "choices" in json.loads(answers(two))
    told = events(two, first["launch_id"])
    assert [each["phase"] for each in told if each["event"] == "phase"][-3:] == [
        "serving",
        "stopping",
        "waiting",
    ]
    assert "restart 1 of 2 in 1 s" in told[-1]["reason"]
    shown = fleet(two, "status").stdout
    assert "restart 1 of this supervisor, after: rank 1 on node1 closed its connection" in shown
    fleet(two, "stop")
    assert status(two)["verdict"] == "down"


def test_failures_in_a_row_come_to_an_end(two: Bed) -> None:
    """Every launch loses a rank as soon as it has one; nothing is left of the last, and the record says why."""
    fleet(two, "serve", "--no-gates")
    watching = two.desk.start(["deskfleet", "fleet", "watch", "-f", FILE])
    dead: set[str] = set()
    while record(two)["phase"] != "failed":
        launch = record(two)["launch_id"]
        for name, shown in two.nodes[1].containers().items():
            is_new = shown["Config"]["Labels"]["deskfleet.launch"] == launch and launch not in dead
            if is_new and shown["State"]["Running"]:
                dead.add(launch)
                two.nodes[1].docker("kill", "--signal", "KILL", name)
        assert len(dead) <= 3
    down = status(two)
    assert len(dead) == 3
    assert (down["verdict"], down["launch"]["exit_code"], down["launch"]["restart"]) == ("down", 3, 2)
    assert "ended with 137" in down["launch"]["reason"]
    assert "that was failure 3 without 30 minutes of service between them" in down["launch"]["reason"]
    assert containers(two) == {}
    two.desk.signal("deskfleet fleet watch", "INT")
    seen, _ = watching.communicate(timeout=30)
    assert "bed: waiting; the next start is due in" in seen
    assert "restart 2 of 2 in 2 s" in seen
    assert seen.rstrip().splitlines()[-2].startswith("bed: failed")


def test_a_fleet_that_waits_is_stopped_or_started_by_hand(two: Bed) -> None:
    later = ("--set", "restart.backoff_s=[100]")
    fleet(two, "serve", "--no-gates", *later)

    def until_waiting() -> dict[str, Any]:
        two.nodes[0].signal_container("deskfleet-bed-0", "KILL")
        assert eventually(lambda: record(two)["phase"] == "waiting"), record(two)
        return status(two)

    waits = until_waiting()
    assert (waits["verdict"], waits["exit_code"], waits["ranks"], waits["endpoint"]) == (
        "waiting",
        1,
        [],
        None,
    )
    assert "restart 1 of 1 in 100 s" in waits["reasons"][0]
    assert "the next start is due in " in waits["reasons"][1]
    assert containers(two) == {}
    assert answers(two) == ""  # nothing listens
    assert fleet(two, "stop").stderr.endswith("bed is stopped\n")
    down = status(two)
    assert (down["verdict"], down["supervisor"], down["launch"]["phase"]) == ("down", None, "stopped")
    assert down["launch"]["exit_code"] == 0

    fleet(two, "serve", "--no-gates", *later)
    before = until_waiting()["supervisor"]
    served = fleet(two, "serve", "--no-gates", *later)
    assert "bed is waiting: rank 0 on node0" in served.stderr
    up = status(two)
    assert (up["verdict"], up["launch"]["restart"]) == ("up", 0)
    assert up["supervisor"] != before


def test_a_restart_waits_for_a_node(two: Bed) -> None:
    fleet(two, "serve", "--no-gates")
    first = record(two)["launch_id"]
    two.nodes[1].stop_sshd()
    try:
        two.nodes[1].signal_container("deskfleet-bed-1", "KILL")
        assert eventually(lambda: record(two)["phase"] == "waiting"), record(two)
        assert "what may still run: deskfleet-bed-1 on node1" in record(two)["reason"]
        time.sleep(BACKOFF_S[0] + 3.0)
        assert (record(two)["launch_id"], record(two)["phase"]) == (first, "waiting")
    finally:
        two.nodes[1].start_sshd()
    assert eventually(lambda: record(two)["phase"] == "serving"), record(two)
    assert len(containers(two)) == 2
    notes = [each["text"] for each in events(two, first) if each["event"] == "watch"]
    assert [note.partition(":")[0] for note in notes] == [
        "node1 cannot be reached",
        "node1 can be reached again",
    ]


def test_a_fleet_that_never_served_fails_at_once(two: Bed) -> None:
    serving = two.desk.start(["deskfleet", "fleet", "serve", "-f", FILE, "--no-gates"])
    assert eventually(lambda: containers(two).get("deskfleet-bed-0") == "running")
    num_launches = len(launches(two))
    two.nodes[0].docker("kill", "--signal", "KILL", "deskfleet-bed-0")
    said, _ = serving.communicate(timeout=90)
    assert serving.returncode == 3, said
    assert "the container deskfleet-bed-0 ended with 137" in said
    assert (record(two)["phase"], record(two)["exit_code"]) == ("failed", 3)
    assert len(launches(two)) == num_launches
    assert status(two)["verdict"] == "down"


def test_a_node_runs_out_of_memory(two: Bed) -> None:
    """Nobody is let in until it has some again; then a prompt is ended; then the ranks are, and come back."""
    floors = floors_of_nodes(machines(read_source(two.desk.path(FILE))).nodes)["node1"]
    node = two.nodes[1]
    fleet(two, "serve", "--no-gates")
    watching = two.desk.start(["deskfleet", "fleet", "watch", "-f", FILE])
    try:
        node.show_memory((floors.abort_bytes + floors.admission_bytes) // 2)
        assert eventually(lambda: record(two)["closed"] is not None, 20)
        refused = json.loads(answers(two))["error"]
        assert refused["code"] == "engine_failed"
        assert "no new requests are taken: node1: " in refused["message"]
        closed = status(two)
        assert (closed["verdict"], closed["exit_code"]) == ("closed", 1)
        assert "nobody is let in: node1: " in closed["reasons"][0]
        again = fleet(two, "serve", "--no-gates", check=False)
        assert (again.returncode, "nothing was changed: nobody is let in" in again.stderr) == (1, True)

        node.show_memory(2 * floors.resume_bytes)
        assert eventually(lambda: "choices" in answers(two), 20)
        assert status(two)["verdict"] == "up"

        long = two.desk.start(question("one two three " * 1800))
        time.sleep(1.5)
        node.show_memory((floors.stop_bytes + floors.abort_bytes) // 2)
        ended = json.loads(long.communicate(timeout=60)[0])["error"]
        assert ended["code"] == "engine_failed"
        assert ended["message"].startswith("memory ran out: node1: ")

        first = record(two)["launch_id"]
        node.show_memory(floors.stop_bytes // 2)
        assert eventually(lambda: record(two)["phase"] == "waiting", 30), record(two)
        assert record(two)["reason"].startswith("ranks are stopped for want of memory: node1: ")
        assert containers(two) == {}
    finally:
        node.show_true_memory()
    assert eventually(lambda: record(two)["phase"] == "serving"), record(two)
    assert "choices" in json.loads(answers(two))
    done = [each["action"] for each in events(two, first) if each["event"] == "memory"]
    assert done[:3] == ["stop_admission", "resume_admission", "stop_admission"]
    assert (done[3], done[-1]) == ("abort_largest_prefill", "stop_ranks")
    two.desk.signal("deskfleet fleet watch", "INT")
    seen, _ = watching.communicate(timeout=30)
    assert "bed: serving, and nobody is let in" in seen
    print(seen)
