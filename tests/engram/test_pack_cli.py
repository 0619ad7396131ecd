"""`python -m deskfleet_engram`, as a person runs it: a process, its exit code, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_fixtures import TINY, make_checkpoint, rows_of

import deskfleet_engram
from deskfleet_engram.__main__ import main
from deskfleet_engram.blocks import use_accelerator
from deskfleet_engram.source import open_source


@pytest.fixture(autouse=True)
def numpy_afterwards() -> Iterator[None]:
    yield
    use_accelerator(None)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(deskfleet_engram.__file__).parents[1])}
    command = [sys.executable, "-m", "deskfleet_engram", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_whole_day(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    packed = run(
        "pack", TINY, target, "--rank", 1, "--world-size", 5, "--repo", "a/b", "--revision", "c", "--json"
    )
    assert packed.returncode == 0
    result = json.loads(packed.stdout)
    assert result["num_packed"] == 6
    assert result["encoder"] == ("numpy" if "note: blocks go through numpy" in packed.stderr else "native")
    info = json.loads(run("info", target, "--json").stdout)
    assert info["columns"] == {"1": [1, 6, 11], "4": [1, 6, 11]}
    assert info["identity"]["source"]["repo"] == "a/b"
    assert "layer 4: columns 1,6,11 of 12" in run("info", target).stdout
    checked = run(
        "verify", target, "--level", "full", "--source", TINY, "--repo", "a/b", "--revision", "c", "--json"
    )
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["num_compared"] > 6000
    source = open_source(TINY)
    row = int(source.geometry.offsets[1, 6]) + 5
    shown = json.loads(run("unpack", target, "--layer", 4, "--rows", f"{row}-{row + 1}", "--json").stdout)
    assert [entry["row"] for entry in shown] == [row, row + 1]
    assert shown[0]["codes"] + shown[0]["scales"] == rows_of(source, 4)[row].tobytes().hex()
    assert (
        "column 6 row 5, L04/c06.egp block 0 slot 5"
        in run("unpack", target, "--layer", 4, "--rows", row).stdout
    )


@pytest.mark.parametrize(
    ("split", "held"),
    [
        ("runs", {"1": [3, 4, 5], "4": [3, 4, 5]}),
        (
            "rows",
            {"1": [2, 3, 4], "4": [2, 3, 4]},
        ),  # 12 columns on 5 ranks: a range begins and ends within one
    ],
)
def test_a_rank_of_an_engine_that_does_not_deal_columns_out(
    split: str, held: dict[str, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "pack")
    assert main(["pack", str(TINY), target, "--rank", "1", "--world-size", "5", "--split", split]) == 0
    capsys.readouterr()
    assert main(["info", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"] == held


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    make_checkpoint(tmp_path / "other", seed=1)
    model, target = str(tmp_path / "model"), str(tmp_path / "pack")
    assert main(["pack", model, target, "--columns", "0-1", "--layers", "3", "--max-rate", "100M"]) == 0
    assert "2 columns packed" in capsys.readouterr().out

    damaged = tmp_path / "pack/L03/c01.egp"
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    assert main(["verify", target]) == 1  # verdict no
    assert "L03/c01.egp, block 0, row 3: checksum" in capsys.readouterr().out
    assert main(["verify", target, "--level", "full", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["row"] == 3

    assert main(["pack", str(tmp_path / "other"), target]) == 1
    assert "is of another checkpoint than" in capsys.readouterr().err
    assert main(["pack", str(tmp_path), target]) == 3
    assert "config.json: cannot read: No such file" in capsys.readouterr().err
    assert main(["info", str(tmp_path), "--json"]) == 3
    captured = capsys.readouterr()
    assert "engram.json is missing" in json.loads(captured.out)["error"]
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["mend"],
        ["pack", "MODEL"],
        ["pack", "MODEL", "x", "--rank", "1"],
        ["pack", "MODEL", "x", "--rank", "5", "--world-size", "5"],
        ["pack", "MODEL", "x", "--columns", "1,x"],
        ["pack", "MODEL", "x", "--columns", "3"],
        ["pack", "MODEL", "x", "--layers", "2"],
        ["pack", "MODEL", "x", "--columns", "1", "--rank", "1", "--world-size", "2"],
        ["pack", "MODEL", "x", "--max-rate", "5X"],
        ["pack", "MODEL", "x", "--max-rate", "-5"],
        ["verify", "x", "--level", "sample"],
        ["verify", "x", "--lev", "full"],
        ["unpack", "x", "--layer", "1", "--rows", "9-3"],
        ["unpack", "x", "--layer", "1", "--rows", "0-1000000"],
    ],
)
def test_bad_input(args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "model") if arg == "MODEL" else arg for arg in args])
    assert caught.value.code == 2
    assert "usage: python -m deskfleet_engram" in capsys.readouterr().err
