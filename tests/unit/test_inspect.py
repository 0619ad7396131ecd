"""inspect: the published totals from a stand-in of the real size, per-rank bytes, and broken checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deskfleet.errors import ConfigError
from deskfleet.model.inspect import inspect_checkpoint
from deskfleet.model.names import TensorClass
from deskfleet.testing.standin import write_published_standin

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"

# Run apart, so that the peak is inspect's own: what the test process has used before would count too.
MEASURE = """
import json, sys, time
from deskfleet.model.inspect import inspect_checkpoint
report = inspect_checkpoint(sys.argv[1], int(sys.argv[2])).to_dict()
cpu_s = time.process_time()
# Not ru_maxrss: that remembers the size of the test process this one was forked from.
with open("/proc/self/status") as status:
    peak_bytes = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
json.dump({"report": report, "cpu_s": cpu_s, "peak_bytes": peak_bytes}, sys.stdout)
"""


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_published_standin(directory)
    return directory


def test_standin_is_large_and_takes_no_disk(standin: Path) -> None:
    shards = sorted(standin.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05d}-of-00048.safetensors" for n in range(1, 49)]
    assert sum(path.stat().st_size for path in shards) > 510_286_023_000
    assert sum(path.stat().st_blocks * 512 for path in shards) < 50_000_000


def test_published_standin_within_time_and_memory(standin: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", MEASURE, str(standin), "8"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    measured = json.loads(finished.stdout)
    report = measured["report"]
    assert report["problems"] == []
    assert report["contents"]["num_tensors"] == 96_085
    assert report["contents"]["total_bytes"] == 510_286_023_000
    assert report["contents"]["num_files"] == 48
    assert report["contents"]["bytes_by_class"] == {
        "routed_expert": 288_777_830_400,
        "dense": 7_199_083_968,
        "engram": 202_758_032_400,
        "draft": 7_932_874_632,
        "vision": 970_536_960,
        "other": 2_647_664_640,
    }
    assert report["contents"]["bytes_by_dtype"] == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    assert report["architecture"] == {
        "model_type": "deepseek_v41",
        "num_layers": 40,
        "num_draft_layers": 3,
        "hidden_size": 5120,
        "vocab_size": 129_280,
        "max_position_embeddings": 1_048_576,
        "num_experts": 384,
        "num_chosen_experts": 6,
        "engram_layer_ids": [1, 14],
        "has_vision": True,
    }
    assert [rank["rank"] for rank in report["ranks"]] == list(range(8))
    assert {rank["bytes_by_class"]["routed_expert"] for rank in report["ranks"]} == {288_777_830_400 // 8}
    assert sum(rank["bytes_by_class"]["engram"] for rank in report["ranks"]) == 202_758_032_400
    # CPU time of the whole process, imports too: on a busy machine the wall clock measures the neighbours.
    assert measured["cpu_s"] < 5, measured["cpu_s"]
    assert measured["peak_bytes"] < 500_000_000, measured["peak_bytes"]


def test_ranks_of_the_golden_checkpoint() -> None:
    inspection = inspect_checkpoint(TINY, tp_size=3)
    assert inspection.problems == ()
    assert inspection.contents is not None
    assert [rank.padding_bytes > 0 for rank in inspection.ranks] == [False, False, True]
    for rank in inspection.ranks:
        assert rank.total_bytes == sum(rank.bytes_by_class.values()) + rank.padding_bytes
        assert (
            rank.bytes_by_class[TensorClass.vision] == inspection.contents.bytes_by_class[TensorClass.vision]
        )
    alone = inspect_checkpoint(TINY, tp_size=1)
    assert alone.ranks[0].bytes_by_class == inspection.contents.bytes_by_class
    assert alone.ranks[0].total_bytes == 9_577_448


def test_without_tp_size_there_are_no_ranks() -> None:
    inspection = inspect_checkpoint(TINY)
    assert (inspection.tp_size, inspection.ranks, inspection.problems) == (None, (), ())


def test_to_dict_is_json() -> None:
    report = inspect_checkpoint(TINY, tp_size=2).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert report["contents"]["bytes_by_class"]["draft"] == 1_217_104
    assert report["ranks"][1]["total_bytes"] == sum(report["ranks"][1]["bytes_by_class"].values())


def broken_copy(directory: Path, change: dict[str, Any] | None = None) -> Path:
    """Link every file of the golden checkpoint, its config.json changed in text_config."""
    for path in TINY.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"] |= change or {}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_broken_files_are_reported(tmp_path: Path) -> None:
    directory = broken_copy(tmp_path)
    (directory / "model-00005-of-00018.safetensors").unlink()
    inspection = inspect_checkpoint(directory, tp_size=2)
    assert inspection.contents is None
    assert inspection.architecture is not None
    assert len(inspection.ranks) == 2  # from the configuration alone
    assert len(inspection.problems) == 1
    assert inspection.problems[0].startswith("shard model-00005-of-00018.safetensors is missing")
    assert inspection.to_dict()["contents"] is None


def test_broken_config_is_reported(tmp_path: Path) -> None:
    inspection = inspect_checkpoint(broken_copy(tmp_path, {"o_groups": 3}), tp_size=2)
    assert (inspection.architecture, inspection.contents, inspection.ranks) == (None, None, ())
    assert "o_groups 3" in inspection.problems[0]
    assert inspection.to_dict()["architecture"] is None


def test_tables_against_their_primes_are_reported(tmp_path: Path) -> None:
    directory = broken_copy(tmp_path, {"engram_vocab_size": 1000})
    inspection = inspect_checkpoint(directory)
    assert inspection.contents is not None  # names, shapes and bytes agree
    assert inspection.problems == (
        "engram layer 1: its 12 columns have 12458 rows together, but engram_num_embeddings says 12386",
    )


def test_missing_directory_is_reported(tmp_path: Path) -> None:
    inspection = inspect_checkpoint(tmp_path / "nowhere")
    assert inspection.problems[0].startswith("no such directory")


def test_bad_tp_size_is_the_callers_fault() -> None:
    with pytest.raises(ConfigError, match="tp_size must be an integer of 1 or more, got 0"):
        inspect_checkpoint(TINY, tp_size=0)
