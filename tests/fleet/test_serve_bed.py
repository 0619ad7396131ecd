"""A fleet's life from `serve` to `stop`, with real sshd, Docker and ranks, and what goes wrong in it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import Bed, EngineImage, bed
from bed.image import VENV
from bed.node import ENGINE_FLAGS

pytestmark = pytest.mark.fleet

FILE = "/root/fleet.toml"
IDLE = (*ENGINE_FLAGS, EngineImage().tag, "sleep", "1000000")
STATE = "/root/.local/state/deskfleet/bed"


def fleet(made: Bed, verb: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`deskfleet fleet VERB` on the desk."""
    return made.desk.run(["deskfleet", "fleet", verb, "-f", FILE, *words], check=check, timeout_s=180)


def status(made: Bed) -> dict[str, Any]:
    ran = fleet(made, "status", "--json", check=False)
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told["exit_code"] == ran.returncode, ran.stderr
    return told


def events(made: Bed) -> dict[str, dict[str, Any]]:
    """The events of the latest launch, of each kind the last."""
    text = made.desk.run(f"cat $(ls -d {STATE}/launches/* | tail -1)/events.jsonl").stdout
    return {event["event"]: event for event in map(json.loads, text.splitlines())}


def phases(made: Bed) -> list[str]:
    """The phases that the latest launch has been in."""
    text = made.desk.run(f"cat $(ls -d {STATE}/launches/* | tail -1)/events.jsonl").stdout
    return [event["phase"] for event in map(json.loads, text.splitlines()) if event["event"] == "phase"]


def eventually(question: Callable[[], bool], wait_s: float = 60.0) -> bool:
    deadline = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def containers(made: Bed) -> dict[str, str]:
    """Every container with its state, on whatever node."""
    return {
        name: shown["State"]["Status"] for node in made.nodes for name, shown in node.containers().items()
    }


@pytest.fixture
def two(pair: Bed) -> Iterator[Bed]:
    """Two nodes and nothing that runs on them, before and after. Nothing is started again: see test_restart_bed.py."""
    pair.desk.write(
        FILE, pair.fleet_toml(checkpoint={"model": "pocket"}, available="4GiB", restart={"backoff_s": []})
    )
    yield pair
    for node in pair.nodes:
        node.mend()
    fleet(pair, "stop", check=False)
    assert containers(pair) == {}


def test_a_fleet_serves_passes_its_gates_and_stops(two: Bed) -> None:
    assert status(two)["verdict"] == "down"
    served = fleet(two, "serve", "--gate", "short-answers")
    assert "pass  short-answers" in served.stderr
    assert "pocket answers at http://127.0.0.1:8000/v1" in served.stderr

    up = status(two)
    assert (up["verdict"], up["endpoint"], up["launch"]["phase"]) == ("up", "healthy", "serving")
    assert [(rank["node"], rank["state"]) for rank in up["ranks"]] == [
        ("node0", "running"),
        ("node1", "running"),
    ]
    again = fleet(two, "serve")
    assert "is up already, nothing was changed" in again.stderr
    assert status(two)["launch"] == up["launch"]

    smoked = json.loads(fleet(two, "smoke", "--gate", "short-answers", "--json").stdout)
    assert smoked["verdict"] == "pass"
    logged = [json.loads(line) for line in fleet(two, "logs", "--json").stdout.splitlines()]
    assert {line["rank"] for line in logged} == {0, 1}
    assert not any(line["captured"] for line in logged)

    stopped = json.loads(fleet(two, "stop", "--json").stdout)
    assert (stopped["supervisor"], stopped["may_still_run"]) == ("stopped", {})
    assert containers(two) == {}
    assert status(two)["verdict"] == "down"
    after = [json.loads(line) for line in fleet(two, "logs", "1", "--json").stdout.splitlines()]
    *before, last = [line["line"] for line in after]
    assert before == [line["line"] for line in logged if line["rank"] == 1]
    assert last.endswith("rank 1: stopped by its supervisor")
    assert all(line["captured"] for line in after)


def test_the_death_of_a_rank_and_of_the_supervisor(two: Bed) -> None:
    """Whoever dies, nothing is left on any node, the reason can be read, and the next serve works."""
    fleet(two, "serve", "--no-gates")
    two.nodes[1].signal_container("deskfleet-bed-1", "KILL")
    assert eventually(lambda: status(two)["verdict"] == "down")
    down = status(two)
    assert down["launch"]["phase"] == "failed"
    assert down["launch"]["exit_code"] == 3
    assert "rank 1 on node1" in down["launch"]["reason"]
    assert "the container deskfleet-bed-1 ended with 137" in down["launch"]["reason"]
    assert containers(two) == {}
    failure = events(two)["failure"]
    assert failure["rank"] == 1
    assert "the container deskfleet-bed-1 ended with 137" in failure["containers"]

    stale = two.nodes[1].stale_container("bed", 1)
    two.nodes[0].docker("run", "--detach", "--name", "somebody-elses", *IDLE)
    served = fleet(two, "serve", "--no-gates")
    assert f"removed {stale} on node1" in served.stderr
    assert containers(two)["somebody-elses"] == "running"
    two.desk.run(["kill", "-KILL", str(status(two)["supervisor"])])
    assert eventually(lambda: set(containers(two).values()) == {"running", "exited"})
    broken = status(two)
    assert (broken["verdict"], broken["exit_code"], broken["supervisor"]) == ("half-alive", 3, None)
    assert any("ended without a word while serving" in reason for reason in broken["reasons"])
    fleet(two, "serve", "--no-gates")
    assert status(two)["verdict"] == "up"
    fleet(two, "stop")
    assert containers(two) == {"somebody-elses": "running"}
    two.nodes[0].docker("rm", "--force", "somebody-elses")


def test_two_launches_a_detached_terminal_and_a_stop_in_the_middle(two: Bed) -> None:
    first = two.desk.start(["deskfleet", "fleet", "serve", "-f", FILE, "--no-gates"])
    assert eventually(lambda: status(two)["verdict"] == "starting")
    second = fleet(two, "serve", check=False)
    assert second.returncode == 3
    assert "the fleet bed is being changed: launch " in second.stderr
    assert eventually(lambda: "loading" in phases(two))
    two.desk.signal("deskfleet fleet serve", "INT")
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert "detached" in said
    assert eventually(lambda: status(two)["verdict"] == "up"), status(two)

    fleet(two, "restart", "--no-gates")
    assert status(two)["verdict"] == "up"
    fleet(two, "stop")
    third = two.desk.start(["deskfleet", "fleet", "serve", "-f", FILE, "--no-gates"])
    assert eventually(lambda: len(containers(two)) == 2)
    fleet(two, "stop")
    said, _ = third.communicate(timeout=60)
    assert third.returncode == 3
    assert "the launch was stopped before it served" in said
    assert containers(two) == {}


def test_stop_names_what_may_still_run_on_a_node_that_is_cut_off(two: Bed) -> None:
    fleet(two, "serve", "--no-gates")
    two.nodes[1].cut()
    stopped = fleet(two, "stop", check=False)
    assert stopped.returncode == 3
    assert "node1: rank 1 (deskfleet-bed-1) may still run" in stopped.stderr
    seen = status(two)
    assert (seen["exit_code"], set(seen["unreachable"])) == (3, {"node1"})
    two.nodes[1].mend()
    fleet(two, "stop")
    assert status(two)["verdict"] == "down"


def test_three_nodes_one_of_them_this_machine_and_answers_that_are_wrong(tmp_path: Path) -> None:
    """Typed on the head. A fleet that answers wrongly is never opened, and nothing of it is left."""
    tiny = tmp_path / "tiny"
    subprocess.run([VENV / "bin/deskfleet", "make-tiny", tiny], check=True, capture_output=True)
    with bed(3) as made:
        program = str(VENV / "bin/deskfleet")

        def here(*words: str) -> subprocess.CompletedProcess[str]:
            words = (program, "fleet", *words, "-f", FILE)
            return made.head.run(words, check=False, timeout_s=180)

        made.head.write(
            FILE, made.fleet_toml(head_is_local=True, checkpoint={"model": "pocket"}, available="4GiB")
        )
        shown = json.loads(here("serve", "--dry-run", "--json").stdout)
        assert [command["node"] for command in shown["commands"]] == ["node1", "node2", "node0"]
        assert all(command["argv"][:3] == ["docker", "run", "--detach"] for command in shown["commands"])
        assert "${secret:rank-token}" in shown["commands"][0]["stdin"]
        assert containers(made) == {}
        served = here("serve", "--gate", "counting")
        assert served.returncode == 0, served.stderr
        assert set(containers(made)) == {"deskfleet-bed-0", "deskfleet-bed-1", "deskfleet-bed-2"}
        assert here("smoke", "--gate", "model").returncode == 0
        assert here("stop").returncode == 0

        for node in made.nodes:
            node.copy_in(tiny, "/srv/checkpoint")
        text = made.fleet_toml(
            head_is_local=True, checkpoint={"model": "/srv/checkpoint"}, available="4GiB", share="local"
        )
        made.head.write(FILE, text)
        refused = here("serve", "--gate", "short-answers")
        assert refused.returncode == 1, refused.stderr
        assert "not opened: of 1 launch gates 1 did not pass: short-answers: " in refused.stderr
        assert containers(made) == {}
