"""Packing of each rank's rows, as nodes run it: the program's text in a process of its own, on the golden checkpoint.

The oracle is deskfleet_engram's own full verification beside the checkpoint, and its ownership of columns.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deskfleet.cli import main
from deskfleet.errors import ConfigError
from deskfleet.fleet.fetch import Job
from deskfleet.fleet.pack_here import PackHere, wanted_columns
from deskfleet.fleet.pull import fetch_program
from deskfleet.fleet.rows import PackOptions, pack_program, ranks_of
from deskfleet.fleet.spec import FleetSpec, NodeSpec, read_spec
from deskfleet_engram.errors import SelectionError
from deskfleet_engram.ownership import ColumnOwnership
from deskfleet_engram.source import open_source
from deskfleet_engram.verify import verify
from tests.cli.cli_process import CHECKPOINT

NUM_COLUMNS = 12
LAYERS = (1, 4)

NODE = """\
[[nodes]]
name = "node-{number}"
kind = "local"
address = "{address}"
fabric = ["198.51.100.{number}"]
paths = {{ checkpoint = "{checkpoint}", engram = "{base}/rows {number}", cache = "{base}/cache" }}
"""
FLEET = """\
name = "desk"
{nodes}
[checkpoint]
model = "v4.1-flash"
revision = "c0ffee"
[engine]
name = "{engine}"
{more}
"""


def fleet(
    base: Path, num_nodes: int, *, engine: str = "native", more: str = "", checkpoint: Path = CHECKPOINT
) -> FleetSpec:
    """A fleet whose nodes all see the golden checkpoint, and have directories of their own for rows."""
    nodes = "".join(
        NODE.format(
            number=number,
            address="local" if number == 0 else f"10.0.0.{number}",
            checkpoint=checkpoint,
            base=base,
        )
        for number in range(num_nodes)
    )
    path = base / "fleet.toml"
    path.write_text(FLEET.format(nodes=nodes, engine=engine, more=more))
    return read_spec(path)


def start(spec: FleetSpec, number: int, options: PackOptions | None = None) -> subprocess.Popen[str]:
    """Start packing as node `number` does."""
    program = pack_program(spec, spec.nodes[number], options or PackOptions())
    path = spec.path.parent / f"program-{time.monotonic_ns()}.py"
    path.write_text(program.text())
    return subprocess.Popen(
        [sys.executable, "-I", "-u", str(path), *program.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the end; return the last event with the exit code."""
    out, err = process.communicate(timeout=60)
    assert err == ""
    last: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**last, "code": process.returncode}


def columns_in(directory: str) -> dict[int, set[int]]:
    """The columns whose files are there, by layer."""
    return {
        layer: {int(path.stem[1:]) for path in Path(directory, f"L{layer:02}").glob("c*.egp")}
        for layer in LAYERS
    }


def test_each_node_packs_what_its_rank_reads(tmp_path: Path) -> None:
    """Three nodes: the columns are those of the ranks and all of them; then two ranks more, and nothing is lost."""
    spec = fleet(tmp_path, 3)
    ownership = ColumnOwnership.split(NUM_COLUMNS, 3)
    for number, process in enumerate([start(spec, number) for number in range(3)]):
        done = finish(process)
        assert (done["code"], done["event"]) == (0, "done"), done
        assert (done["num_columns"], done["num_packed"]) == (8, 8)
        assert done["other_columns"] == {}
        directory = spec.nodes[number].paths.engram
        assert columns_in(directory) == {layer: set(ownership.columns(number)) for layer in LAYERS}
        source = open_source(CHECKPOINT, repo="v4.1-flash", revision="c0ffee")
        checked = verify(Path(directory), level="full", source=source)
        assert checked.is_sound
        assert checked.num_compared > 0
    two = fleet(tmp_path, 2)
    again = finish(start(two, 0))
    assert (again["num_packed"], again["num_kept"]) == (8, 4)
    assert again["other_columns"] == {"1": "3,9", "4": "3,9"}
    assert again["other_bytes"] > 0
    assert columns_in(two.nodes[0].paths.engram)[1] == {0, 2, 3, 4, 6, 8, 9, 10}


def test_killed_while_packing_goes_on(tmp_path: Path) -> None:
    spec = fleet(tmp_path, 1)
    process = start(spec, 0, PackOptions(max_bytes_per_s=300_000))
    directory = Path(spec.head.paths.engram)
    end = time.monotonic() + 30
    while not list(directory.glob("L01/c*.egp*")):
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (directory / "engram.json").exists()
    done = finish(start(spec, 0, PackOptions(level="full")))
    assert (done["code"], done["num_columns"]) == (0, 24), done
    assert done["num_compared"] > 0
    assert not list(directory.rglob("*.partial"))


def test_what_is_refused(tmp_path: Path) -> None:
    """Another checkpoint's pack, a checkpoint that is not there, a disk without room."""
    spec = fleet(tmp_path, 1)
    assert finish(start(spec, 0))["code"] == 0
    other = tmp_path / "other"
    shutil.copytree(CHECKPOINT, other)
    # One byte of the table's first row: the headers are equal, the rows are not.
    table = open_source(other).tables[0].weight
    with table.path.open("r+b") as shard:
        shard.seek(table.offset_bytes)
        byte = shard.read(1)
        shard.seek(table.offset_bytes)
        shard.write(bytes([byte[0] ^ 1]))
    wrong = finish(start(fleet(tmp_path, 1, checkpoint=other), 0))
    assert (wrong["type"], wrong["code"]) == ("WrongPack", 1)
    absent = finish(start(fleet(tmp_path, 1, checkpoint=tmp_path / "nothing"), 0))
    assert (absent["type"], absent["code"]) == ("CheckpointError", 3)
    small = start(replace_rows(fleet(tmp_path, 1), tmp_path / "small"), 0)
    resource.prlimit(small.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    full = finish(small)
    assert full["code"] in (1, 3)
    assert full["event"] == "error"
    assert not list((tmp_path / "small").glob("L*/c*.egp")), "no half file has its name"


def replace_rows(spec: FleetSpec, directory: Path) -> FleetSpec:
    """The fleet with the head's rows in another directory."""
    head = replace(spec.head, paths=replace(spec.head.paths, engram=str(directory)))
    return replace(spec, nodes=(head, *spec.nodes[1:]))


STRIDED = [{0, 3, 6, 9}, {1, 4, 7, 10}, {2, 5, 8, 11}]
RUNS = [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]


def columns_of(spec: FleetSpec, node: NodeSpec) -> set[int]:
    """The columns that the node's job names; they are the same in both layers unless rows are shared out."""
    words = json.loads(pack_program(spec, node, PackOptions()).arguments[0])
    found = wanted_columns(open_source(CHECKPOINT), PackHere(**{**words, "ranks": tuple(words["ranks"])}))
    by_layer = [{column for layer, column in found if layer == each} for each in LAYERS]
    assert words["split"] == "runs or rows" or by_layer[0] == by_layer[1]
    return by_layer[0]


@pytest.mark.parametrize(("engine", "columns"), [("native", STRIDED), ("vllm", RUNS), ("sglang", RUNS)])
def test_columns_are_those_that_the_engine_reads(
    tmp_path: Path, engine: str, columns: list[set[int]]
) -> None:
    """Another rank's rows give fluent nonsense, so the columns stand here as the engines' sources have them."""
    spec = fleet(tmp_path, 3, engine=engine)
    assert [columns_of(spec, node) for node in spec.nodes] == columns
    # Two ranks on a node read what both read.
    several = fleet(tmp_path, 2, engine=engine, more="[wishes]\ntp_size = 4")
    second = {2, 3, 6, 7, 10, 11} if engine == "native" else {6, 7, 8, 9, 10, 11}
    assert columns_of(several, several.nodes[1]) == second


def test_ranks_and_their_columns(tmp_path: Path) -> None:
    """Several ranks on a node, ranges of rows where SGLang has them, and layouts that do not spread."""
    several = fleet(tmp_path, 2, more="[wishes]\ntp_size = 4")
    assert [ranks_of(several, node) for node in several.nodes] == [((0, 1), 4), ((2, 3), 4)]
    with pytest.raises(ConfigError, match="does not spread over 2 nodes"):
        pack_program(fleet(tmp_path, 2, more="[wishes]\ntp_size = 3"), several.head, PackOptions())
    # Twelve columns among five: SGLang cuts the tables by row, and columns at the cuts are needed twice.
    sglang = fleet(tmp_path, 5, engine="sglang")
    each = [columns_of(sglang, node) for node in sglang.nodes]
    assert set.union(*each) == set(range(NUM_COLUMNS))
    assert all(3 <= len(columns) <= 4 for columns in each)
    assert each[0] & each[1], "the first cut goes through a column"
    # vLLM gives all ranks equally many places, and the last gets none.
    vllm = fleet(tmp_path, 5, engine="vllm")
    assert columns_of(vllm, vllm.nodes[3]) == {9, 10, 11}
    with pytest.raises(SelectionError, match="rank 4 of 5 reads none of the 12"):
        columns_of(vllm, vllm.nodes[4])


def test_an_engine_that_reads_no_packs(typed: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    spec = fleet(tmp_path, 2, engine="exl3")
    code, _, err = typed("fleet", "pack", "-f", spec.path, "--dry-run")
    assert code == 2
    assert "engine exl3 reads the published shards" in err
    assert "hint: put those two shards" in err


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in this process; returns its exit code and what it wrote."""
    handlers = logging.root.handlers[:]

    def run(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        logging.root.handlers[:] = handlers
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_command(typed: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    spec = fleet(tmp_path, 1)
    shown = typed("fleet", "pack", "-f", spec.path, "--dry-run")
    assert shown[0] == 0
    assert "bash -s -- " in shown[1]
    assert not Path(spec.head.paths.engram).exists()
    code, out, err = typed("fleet", "pack", "-f", spec.path, "--verify", "sample", "--json")
    assert code == 0, err
    packed = json.loads(out)
    assert (packed["node"], packed["ranks"], packed["world_size"]) == ("node-0", [0], 1)
    assert (packed["num_packed"], packed["encoder"]) == (24, "native")
    again = typed("fleet", "pack", "-f", spec.path)
    assert "rank 0 of 1: 24 columns" in again[1]
    assert "0 packed, 24 kept" in again[1]
    assert not [path for path in Path(spec.head.paths.engram).iterdir() if "program" in path.name]
    two = fleet(tmp_path, 2, more="[wishes]\ntp_size = 3")
    assert typed("fleet", "pack", "-f", two.path)[0] == 2


def test_programs_that_travel_need_only_an_old_python(tmp_path: Path) -> None:
    """A bare node may have Python 3.10, and has none of our packages."""
    import ast

    from deskfleet.fleet import offer, program

    assert offer.main

    for name in (*program._TRAVELLING, "deskfleet.fleet.offer"):
        path = Path(sys.modules[name].__file__ or "")
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        imported = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for module in imported:
            root = module.split(".")[0]
            assert module in program._TRAVELLING or root in sys.stdlib_module_names, (name, module)
    # Without our environment's packages the program still runs as far as its own check of the job.
    text = fetch_program(Job("http://127.0.0.1:1", "", str(tmp_path / "x")), fleet(tmp_path, 1).engine, None)
    path = tmp_path / "program.py"
    path.write_text(text.text())
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(path), *text.arguments],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        check=False,
    )
    assert json.loads(done.stdout)["message"] == "no revision is named", done.stderr
    assert done.returncode == 2
