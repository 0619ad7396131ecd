"""Packs as deskfleet sees them: errors keep their exit codes, columns have one owner, reports are plain data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import deskfleet_engram.errors as engram_errors
from deskfleet.endpoint import EngramStats
from deskfleet.errors import DeskfleetError, WrongPack
from deskfleet.model.config import ModelConfig
from deskfleet.model.inspect import inspect_checkpoint, inspect_pack
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.packs import PackJob, as_deskfleet_errors, check_pack, is_pack, spell_missing
from deskfleet_engram.errors import EngramError, SelectionError
from deskfleet_engram.ownership import ColumnOwnership, select_columns, spell_numbers
from deskfleet_engram.source import open_source, read_spec

TINY = Path(__file__).parents[1] / "golden" / "v41-tiny" / "model"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "pack"
    PackJob.prepare(TINY, directory).run(on_progress=lambda progress: None)
    return directory


@pytest.mark.parametrize("name", engram_errors.__all__)
def test_every_error_keeps_message_hint_and_exit_code(name: str) -> None:
    kind: type[EngramError] = getattr(engram_errors, name)
    with pytest.raises(DeskfleetError) as caught, as_deskfleet_errors():
        raise kind("what happened", hint="what to do")
    error = caught.value
    assert (error.message, error.hint, error.exit_code) == ("what happened", "what to do", kind.exit_code)
    assert isinstance(error.__cause__, kind)


@pytest.mark.parametrize("tp_size", range(1, 15))
def test_columns_have_one_owner(tp_size: int) -> None:
    """What a rank reads is what `pack --rank --world-size` packs, and the whole after a gather is in column order."""
    config = ModelConfig.from_file(TINY / "config.json")
    plan = ShardPlan(config, Layout(tp_size))
    ownership = ColumnOwnership.split(config.engram_num_columns, tp_size)
    spec = read_spec(TINY)
    parts = []
    for rank in range(tp_size):
        columns = plan.engram_columns(rank)
        assert columns == ownership.columns(rank) == tuple(range(rank, 12, tp_size))
        if columns:
            chosen = select_columns(spec, rank=rank, world_size=tp_size)
            assert chosen == [(layer, column) for layer in (1, 4) for column in columns]
        else:
            with pytest.raises(SelectionError, match="reads none of the 12 columns"):
                select_columns(spec, rank=rank, world_size=tp_size)
        padding = plan.engram_columns_per_rank - len(columns)
        parts.append([*columns, *[-1] * padding])
    assert np.concatenate(parts)[plan.engram_ownership.gather_order()].tolist() == list(range(12))


def test_select_columns_of_layers() -> None:
    spec = read_spec(TINY)
    assert len(select_columns(spec)) == 24
    assert select_columns(spec, layers=(4,), columns=(3, 7)) == [(4, 3), (4, 7)]


@pytest.mark.parametrize(
    ("numbers", "text"), [((), "none"), ((0, 1, 2, 5), "0-2,5"), ((7,), "7"), ((1, 3, 4), "1,3-4")]
)
def test_numbers_are_spelled_as_flags_take_them(numbers: tuple[int, ...], text: str) -> None:
    assert spell_numbers(numbers) == text


def test_missing_columns_are_spelled() -> None:
    assert spell_missing({1: (1, 5), 14: (5,)}) == "columns 1,5 of layer 1, columns 5 of layer 14"


def test_a_plan_writes_nothing_and_a_finished_pack_needs_nothing(tmp_path: Path) -> None:
    job = PackJob.prepare(TINY, tmp_path / "pack", rank=0, world_size=4)
    plan = job.plan()
    assert not (tmp_path / "pack").exists()
    assert (plan.num_to_pack, plan.num_complete) == (6, 0)
    report = job.run(on_progress=lambda progress: None)
    assert report.num_packed == 6
    # What is needed beyond the files is room for the journal and the manifest.
    assert plan.needed_bytes == report.packed_bytes + (1 << 20)
    again = job.plan()
    assert (again.num_to_pack, again.num_complete, again.needed_bytes, again.read_bytes) == (0, 6, 0, 0)


def test_which_directories_are_packs(pack: Path, tmp_path: Path) -> None:
    assert is_pack(pack)
    assert not is_pack(TINY)
    assert not is_pack(tmp_path)
    (tmp_path / "engram.journal").touch()
    assert is_pack(tmp_path), "one that was begun"
    (tmp_path / "config.json").touch()
    assert not is_pack(tmp_path), "a checkpoint with a pack inside"


def test_reports_are_json(pack: Path) -> None:
    report = inspect_pack(pack).to_dict()
    assert json.loads(json.dumps(report))["layers"][0]["columns"] == list(range(12))
    beside = inspect_checkpoint(TINY, 13, engram_pack=pack).to_dict()["engram_pack"]
    assert json.loads(json.dumps(beside)) == beside
    assert all(rank["is_covered"] for rank in beside["ranks"])
    assert len(beside["ranks"]) == 13


def test_rows_that_differ_under_equal_headers(pack: Path, tmp_path: Path) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    scale = open_source(model).table(4).scale
    with scale.path.open("r+b") as file:
        file.seek(scale.offset_bytes + scale.num_bytes - 2)  # the last row's
        file.write(b"\x01\x02")
    with pytest.raises(WrongPack, match=r"source\.tables\[1\]\.sample_sha256 is "):
        check_pack(pack, model, [range(12)])
    fit = inspect_checkpoint(model, 2, engram_pack=pack).pack
    assert fit is not None
    assert not fit.is_fit
    assert fit.mismatch is not None


def test_counters_of_ranks_add_up() -> None:
    one = EngramStats(num_rows=3, read_bytes=4096, wait_s=0.5, errors={"checksum": 2, "io": 1})
    other = EngramStats(num_rows=4, num_fallback_rows=1, wait_s=0.25, errors={"checksum": 1})
    assert sum([one, other], EngramStats()) == EngramStats(
        num_rows=7, num_fallback_rows=1, read_bytes=4096, wait_s=0.75, errors={"checksum": 3, "io": 1}
    )
