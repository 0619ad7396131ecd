"""A fleet's preparation, `init` to `pack`, on real nodes: the whole way on four, and what goes wrong on the way.

The checkpoint comes from a server that fails; the oracles are its bytes, and answers to questions that only the right
rows and weights can give.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bed import Bed, EngineImage, Machine, Node, NodeSetup, bed
from bed.image import VENV, mounts
from faulty_origin import REVISION, Fault, FaultyOrigin, Kind

from deskfleet.fleet.engines.contract import ports_of
from deskfleet.gates.registry import LAUNCH_GATES

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
POCKET = {path.name: path.read_bytes() for path in sorted((ROOT / "pocket/checkpoint").iterdir())}
SHARDS = sorted(name for name in POCKET if name.endswith(".safetensors"))
INDEX = "model.safetensors.index.json"
FILE = "/root/fleet.toml"
# The gateway names a model after its directory, and gates ask by that name what Pocket knows.
MODEL = "/srv/pocket"
GATES = ("--gate", "short-answers", "--gate", "facts", "--gate", "answers-at-once")
ANN = NodeSetup(
    "ann",
    '/data/Ann\'s "home" $HOME ü',
    checkpoint="/data/check 'point' \"$HOME\" ü",
    engram="/data/rows `x` 100%",
    cache="/data/ca che's",
)


class Flaky(FaultyOrigin):
    """As `FaultyOrigin`; a file that was cut off as often as it should be refuses its next range."""

    def take(self, name: str, *kinds: Kind) -> Fault | None:
        fault = super().take(name, *kinds)
        if fault is not None and fault.kind == "reset" and not fault.times:
            self.faults[name] = Fault("416", 1)
        return fault


@contextmanager
def origin(made: Bed) -> Iterator[Flaky]:
    """A server on the desk's network that has the checkpoint."""
    server = Flaky(dict(POCKET))
    with made.desk.network():
        serving = server.serving(made.desk.address())
        serving.__enter__()
    try:
        yield server
    finally:
        serving.__exit__(None, None, None)


def typed(
    machine: Machine, verb: str, *words: str, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`deskfleet fleet VERB` there, whatever comes of it."""
    command = [str(VENV / "bin/deskfleet"), "fleet", verb, *words, "--file", FILE]
    return machine.run(command, check=False, timeout_s=timeout_s, env={"COLUMNS": "160"})


def done(machine: Machine, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The same, which must work."""
    ran = typed(machine, verb, *words)
    assert ran.returncode == 0, f"{verb}: {ran.stderr}"
    return ran


def objects(ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What --json printed, an object a line."""
    return [json.loads(line) for line in ran.stdout.splitlines()]


def eventually(question: Callable[[], bool], wait_s: float = 30.0) -> bool:
    deadline = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def left(node: Node) -> list[str]:
    """What a verb may have left on a node; the NFS server, once started, goes on as on any machine."""
    places = [
        node.setup.checkpoint,
        node.setup.engram,
        node.setup.cache,
        MODEL,
        "/srv/deskfleet",
        "/srv/small",
    ]
    there = [place for place in places if node.path(place).exists()]
    names = ("*.part", "*.part.done", "*.partial", "*.journal", ".deskfleet-program*", "*.new")
    pattern = " -o ".join(f"-name '{name}'" for name in names)
    found = (
        node.run(["bash", "-c", f'find "$@" {pattern}', "find", *there]).stdout.splitlines() if there else []
    )
    mounted = [line for line in node.run(["cat", "/proc/mounts"]).stdout.splitlines() if "fuse.nfs4" in line]
    running = [command for command in node.processes().values() if not command.endswith("nfs.py listen")]
    return [*running, *node.containers(), *mounted, *found]


def nothing_left(made: Bed) -> None:
    """No node has anything of what was done; a closed connection takes a moment to end what it had started."""
    assert eventually(lambda: not any(left(node) for node in made.nodes), 10), [*map(left, made.nodes)]


def whole(node: Node, directory: str) -> bool:
    """Whether the directory holds the checkpoint, byte for byte."""
    found = {path.name: path for path in node.path(directory).iterdir() if not path.name.startswith(".")}
    return found.keys() == POCKET.keys() and all(found[name].read_bytes() == POCKET[name] for name in found)


def half_files(node: Node, directory: str) -> list[str]:
    """Files that have their final name and not the origin's bytes."""
    there = node.path(directory)
    return [
        name for name in POCKET if (there / name).exists() and (there / name).read_bytes() != POCKET[name]
    ]


def test_four_nodes_from_nothing_to_answers_and_back() -> None:
    """`init` writes the file, a user fills in what it cannot know, and every verb does its part, typed on the head."""
    with bed(4, nfs=True) as made, origin(made) as server:
        head = made.head
        nodes = [word for node in ("local", "node1", "node2", "node3") for word in ("--node", node)]
        done(head, "init", *nodes, "--name", "bed", "--engine", "native", "--model", MODEL)
        filled_in(head, made, server)
        seen = done(head, "doctor", "--no-traffic")
        assert "are not compared with a plan: no such directory: /srv/pocket" in seen.stderr

        server.faults = {SHARDS[4]: Fault("missing")}
        missing = typed(head, "pull")
        assert (missing.returncode, missing.stdout) == (3, ""), missing.stderr
        assert SHARDS[4] in missing.stderr
        assert "404" in missing.stderr
        assert half_files(head, MODEL) == []
        assert not head.path(f"{MODEL}/{SHARDS[4]}").exists()
        server.faults = {
            SHARDS[4]: Fault("reset", 1),
            SHARDS[5]: Fault("wrong", 1),
            SHARDS[6]: Fault("busy", 2),
            INDEX: Fault("reset", 1),
        }
        (pulled,) = objects(done(head, "pull", "--json"))
        assert (pulled["num_files"], pulled["revision"]) == (len(POCKET), REVISION)
        assert whole(head, MODEL)
        assert None in server.spans(SHARDS[4])[1:], "a range that was refused is asked for as a whole file"

        alone = typed(head, "share", "--set", "share=local")
        assert (alone.returncode, "nothing was brought anywhere" in alone.stderr) == (1, True)
        proofs = objects(done(head, "share", "--json"))
        assert [(proof["is_good"], proof["place"]["filesystem"]) for proof in proofs[1:]] == [
            (True, "nfs4")
        ] * 3
        packed = objects(done(head, "pack", "--json"))
        assert [each["ranks"] for each in packed] == [[0], [1], [2], [3]]
        assert {each["num_columns"] for each in packed} == {packed[0]["num_columns"]}

        served = done(head, "serve")
        assert served.stderr.count("  pass  ") == len(LAUNCH_GATES), served.stderr
        launched = json.loads(done(head, "status", "--json").stdout)
        assert [(rank["node"], rank["state"]) for rank in launched["ranks"]] == [
            (name, "running") for name in ("head", "node1", "node2", "node3")
        ]
        for rank, node in enumerate(made.nodes):
            shown = node.containers()[f"deskfleet-bed-{rank}"]
            assert "--engram-pack" in shown["Args"], "each rank reads its own rows"
        assert json.loads(done(head, "smoke", "--gate", "facts", "--json").stdout)["verdict"] == "pass"
        assert {line["rank"] for line in objects(done(head, "logs", "--json"))} == {0, 1, 2, 3}
        done(head, "stop")
        done(head, "share", "--undo")
        assert json.loads(typed(head, "status", "--json").stdout)["verdict"] == "down"
        nothing_left(made)
        assert whole(head, MODEL), "what was pulled and packed stays"
        assert head.path("/srv/deskfleet/cache/engram/engram.json").exists()


def filled_in(head: Node, made: Bed, server: FaultyOrigin) -> None:
    """What a user writes into the file that `init` has made: image, origin, and addresses on the fast network."""
    text = head.path(FILE).read_text()
    changes = {
        '# image = "registry/name@sha256:..."': f'image = "{EngineImage().id}"\nmounts = {json.dumps(mounts())}',
        '# revision = "0123abc..."': f'revision = "{REVISION}"',
        '# origin = "https://HUB/OWNER/NAME"': f'origin = "{server.url}"',
        'checkpoint = "/srv/deskfleet/checkpoint"': f'checkpoint = "{MODEL}"',
        '# share = "nfs"': 'share = "nfs"',
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    # The head is local, so `init` has found an address that the others reach, though not the fast one.
    text = text.replace(f'fabric = ["{head.address()}"]', f'fabric = ["{head.address("fabric")}"]')
    for node in made.nodes[1:]:
        text = text.replace('# fabric = ["192.168.100.1"]', f'fabric = ["{node.address("fabric")}"]', 1)
    assert [line[:15] for line in text.splitlines() if "fabric =" in line] == ['fabric = ["10.7'] * 4
    head.write(FILE, text)


@pytest.fixture(scope="module")
def odd() -> Iterator[Bed]:
    """Three nodes: the second is Ann's, whose home and paths have spaces, quotes and more. The desk has the model."""
    with bed(3, setups=[NodeSetup(), ANN], nfs=True) as made:
        made.desk.copy_in(ROOT / "pocket/checkpoint", MODEL)
        yield made


@pytest.fixture
def three(odd: Bed) -> Iterator[Bed]:
    """The odd nodes with nothing on them, and nothing left afterwards."""
    yield odd
    for node in odd.nodes:
        node.mend()
        node.accept_key()
    typed(odd.desk, "stop")
    nothing_left(odd)
    for node in odd.nodes:
        for place in (node.setup.checkpoint, node.setup.engram):
            node.run(["find", place, "-mindepth", "1", "-delete"], check=False)


def written(made: Bed, server: FaultyOrigin | None = None, **values: Any) -> str:
    """The text of a fleet.toml of these nodes, put onto the desk."""
    checkpoint = {
        "model": MODEL,
        "revision": REVISION,
        "origin": server.url if server else "http://127.0.0.1:1/a/b",
    }
    text = made.fleet_toml(available="4GiB", **{"checkpoint": checkpoint, "share": "copy", **values})
    made.desk.write(FILE, text)
    return text


def test_other_users_homes_and_values_with_everything_in_them(three: Bed) -> None:
    """A file as Windows writes it, whose paths and values have spaces, quotes and what shells love to read."""
    note = 'say "hi" to $HOME, it\'s `x` \\ 100% ü'
    with origin(three) as server:
        text = written(three, server, engine={"env": {"NOTE": note}})
        three.desk.path(FILE).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        done(three.desk, "pull")
    shared = done(three.desk, "share")
    assert f"node1: has all: {len(POCKET)} of {len(POCKET)} files" in shared.stdout
    assert whole(three.nodes[1], ANN.checkpoint)
    packed = done(three.desk, "pack", "--verify", "full")
    assert f"in {ANN.engram}; " in packed.stdout
    served = done(three.desk, "serve", *GATES)
    assert 'node1: account: ann (uid 2000), home /data/Ann\'s "home" $HOME ü' in served.stderr
    inside = three.nodes[1].containers()["deskfleet-bed-1"]
    assert f"NOTE={note}" in inside["Config"]["Env"]
    sources = {mount["Source"] for mount in inside["Mounts"]}
    assert {ANN.checkpoint, ANN.engram} <= sources
    done(three.desk, "stop")


def test_a_file_of_another_encoding_is_refused_with_its_reason(three: Bed) -> None:
    text = written(three)
    three.desk.path(FILE).write_bytes(text.encode("utf-16"))
    for verb in ("doctor", "pull", "serve", "stop"):
        ran = typed(three.desk, verb)
        assert (ran.returncode, ran.stdout) == (2, ""), verb
        assert "is not UTF-8" in ran.stderr
        assert "Traceback" not in ran.stderr
    written(three)


def test_ports_that_somebody_has(three: Bed) -> None:
    """The engine's meeting point on the head, and on the desk the gateway's and the one that ranks dial."""
    written(three, checkpoint={"model": "pocket"})
    ports = ports_of("bed")
    desk, head = three.desk, three.head

    def verdicts() -> dict[str, str]:
        found = json.loads(typed(desk, "doctor", "--no-traffic", "--json").stdout)["findings"]
        return {each["node"]: each["measured"] for each in found if each["check"] == "ports"}

    def refused(code: int, words: str) -> None:
        ran = typed(desk, "serve", "--no-gates")
        assert ran.returncode == code, ran.stderr
        assert words in ran.stderr
        assert not any(node.containers() for node in three.nodes)

    ours = f"{ports.engine}, 8000"
    assert verdicts() == {
        "this machine": f"{ours} free",
        "node0": f"{ports.rendezvous} free",
        **dict.fromkeys(("node1", "node2"), "no port is needed here"),
    }
    with taken(desk, ports.engine), head.taken_port(ports.rendezvous):
        with taken(desk, 8000):
            found = verdicts()
            assert (found["this machine"], found["node0"]) == (f"{ours} taken", f"{ports.rendezvous} taken")
            refused(3, "port 8000 of 127.0.0.1 is in use")
        both = (f"node0: ports: {ports.rendezvous} taken", f"this machine: ports: {ports.engine} taken")
        refused(1, "not started, 2 checks fail: " + "; ".join(both))


@contextmanager
def taken(desk: Machine, port: int) -> Iterator[None]:
    """Somebody else's program listens on the desk."""
    process = desk.start(["python", "-m", "http.server", str(port), "--bind", "127.0.0.1"])
    try:
        assert eventually(lambda: desk.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", check=False).returncode == 0)
        yield
    finally:
        process.kill()
        process.wait()


def test_a_disk_that_fills_up_while_it_is_pulled(three: Bed) -> None:
    """Too small from the start, then full in the middle: no half file has its name, and the same command goes on."""
    head, place = three.head, "/srv/small"
    head.limit_disk(place, 90 << 20)
    try:
        with origin(three) as server:
            written(three, server)
            words = ("--set", f"nodes[0].paths.checkpoint={place}/checkpoint")
            head.fill_disk(place, free_bytes=40 << 20)
            small = typed(three.desk, "pull", *words)
            assert small.returncode == 1, small.stderr
            assert "are to come, and" in small.stderr
            assert not server.spans(SHARDS[0])
            head.run(["rm", f"{place}/filling"])

            server.faults = {name: Fault("slow", value=300_000) for name in SHARDS[-2:]}
            pulling = three.desk.start([str(VENV / "bin/deskfleet"), "fleet", "pull", *words, "-f", FILE])
            assert eventually(lambda: all(map(server.spans, SHARDS[-2:])))
            assert eventually(lambda: whole_shards(head, f"{place}/checkpoint") == len(SHARDS) - 2)
            head.fill_disk(place)
            said, _ = pulling.communicate(timeout=60)
            assert pulling.returncode == 1, said
            assert "the disk is full (No space left on device)" in said
            assert "the same command again: it goes on from where it stopped" in said
            assert half_files(head, f"{place}/checkpoint") == []
            head.run(["rm", f"{place}/filling"])

            server.faults = {}
            (pulled,) = objects(done(three.desk, "pull", *words, "--json"))
            assert pulled["num_fetched"] == 2, "what had come is kept"
            assert whole(head, f"{place}/checkpoint")
    finally:
        head.run(["umount", place])


def whole_shards(node: Node, directory: str) -> int:
    return len(list(node.path(directory).glob("*.safetensors")))


def test_a_disk_that_is_full_while_it_is_packed(three: Bed) -> None:
    """Packing reserves its room first: too small is said before anything is written, and a full disk loses nothing."""
    head, place = three.head, "/srv/small"
    head.copy_in(ROOT / "pocket/checkpoint", head.setup.checkpoint)
    head.limit_disk(place, 40 << 20)
    try:
        written(three)
        words = ("--on", "node0", "--set", f"nodes[0].paths.engram={place}/rows")
        head.fill_disk(place, free_bytes=1 << 20)
        small = typed(three.desk, "pack", *words)
        assert small.returncode == 1, small.stderr
        assert "more bytes, and" in small.stderr
        assert not list(head.path(place).glob("rows/*"))
        head.run(["rm", f"{place}/filling"])

        packing = three.desk.start(
            [str(VENV / "bin/deskfleet"), "fleet", "pack", *words, "--max-rate", "1MB", "-f", FILE]
        )
        rows = head.path(f"{place}/rows")
        assert eventually(lambda: any(rows.glob("L*/*.egp")))
        head.fill_disk(place)
        said, _ = packing.communicate(timeout=60)
        assert packing.returncode == 1, said
        assert "the disk is full" in said
        assert not (rows / "engram.json").exists()
        head.run(["rm", f"{place}/filling"])
        (packed,) = objects(done(three.desk, "pack", *words, "--verify", "full", "--json"))
        assert packed["num_kept"] > 0
        assert packed["num_compared"] > 0
    finally:
        head.run(["umount", place])


def test_whoever_types_is_killed(three: Bed) -> None:
    """A pull and a pack whose command was killed end on the nodes too, and the next ones go on."""
    head = three.head
    with origin(three) as server:
        written(three, server)
        server.faults = {SHARDS[-1]: Fault("slow", value=200_000)}
        pulling = three.desk.start([str(VENV / "bin/deskfleet"), "fleet", "pull", "-f", FILE])
        assert eventually(lambda: whole_shards(head, head.setup.checkpoint) == len(SHARDS) - 1)
        assert head.processes()
        kill(three.desk, pulling)
        assert eventually(lambda: not head.processes()), head.processes()
        assert half_files(head, head.setup.checkpoint) == []
        server.faults = {}
        (pulled,) = objects(done(three.desk, "pull", "--json"))
        assert pulled["num_fetched"] == 1
    done(three.desk, "share")
    packing = three.desk.start(
        [str(VENV / "bin/deskfleet"), "fleet", "pack", "--max-rate", "300kB", "-f", FILE]
    )
    assert eventually(lambda: all(node.containers() for node in three.nodes))
    kill(three.desk, packing)
    assert eventually(lambda: not any(node.containers() for node in three.nodes))
    done(three.desk, "pack", "--verify", "full")


def kill(desk: Machine, process: subprocess.Popen[str]) -> None:
    """SIGKILL the command itself there; what it started is left to find that out."""
    desk.run(["pkill", "-KILL", "-f", "bin/deskfleet fleet"])
    process.communicate(timeout=20)


def test_a_worker_that_refuses_the_key(three: Bed) -> None:
    """Every verb names it, with exit code 3, and does nothing by halves; once let in, the same commands work."""
    written(three, checkpoint={"model": MODEL})
    three.head.copy_in(ROOT / "pocket/checkpoint", three.head.setup.checkpoint)
    worker = three.nodes[1]
    worker.refuse_key()
    for verb in ("share", "pack", "serve", "stop"):
        ran = typed(three.desk, verb)
        assert ran.returncode == 3, f"{verb}: {ran.stderr}"
        assert "node1" in ran.stdout + ran.stderr
        assert "refused our key" in (ran.stdout + ran.stderr).replace("\n", " "), f"{verb}: {ran.stderr}"
        assert not any(node.containers() for node in three.nodes)
    worker.accept_key()
    done(three.desk, "share")
    assert whole(worker, ANN.checkpoint)


def said_so_far(desk: Machine) -> str:
    """The events of the launch under way."""
    return desk.run("cat /root/.local/state/deskfleet/bed/launches/*/events.jsonl", check=False).stdout


def test_nfs_that_is_gone_while_ranks_load() -> None:
    """The launch fails with the file's name, nothing of it is left, and share mends the mount that was lost."""
    with bed(2, nfs=True) as made:
        made.desk.copy_in(ROOT / "pocket/checkpoint", MODEL)
        made.head.copy_in(ROOT / "pocket/checkpoint", made.head.setup.checkpoint)
        worker = made.nodes[1]
        written(made, share="nfs")
        done(made.desk, "share")
        worker.slow("fabric", bytes_per_s=1.5e6)
        serving = made.desk.start([str(VENV / "bin/deskfleet"), "fleet", "serve", "--no-gates", "-f", FILE])
        assert eventually(lambda: "weights, " in said_so_far(made.desk), 90), said_so_far(made.desk)
        worker.run(["pkill", "-KILL", "sshfs"])
        said, _ = serving.communicate(timeout=120)
        assert serving.returncode == 3, said
        assert "rank 1 on node1 failed" in said
        assert "Transport endpoint is not connected" in said
        worker.mend("fabric")
        down = json.loads(typed(made.desk, "status", "--json").stdout)
        assert (down["verdict"], down["launch"]["phase"]) == ("down", "failed")
        assert not any(node.containers() for node in made.nodes)

        gone = typed(made.desk, "share", "--only-prove")
        assert gone.returncode == 1, gone.stderr
        assert "node1: LACKS something" in gone.stdout
        done(made.desk, "share", "--undo")
        done(made.desk, "share")
        done(made.desk, "serve", "--no-gates")
        done(made.desk, "stop")
        done(made.desk, "share", "--undo")
        nothing_left(made)
