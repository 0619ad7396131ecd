"""`pocket` by its name: from any directory, from a wheel, and never in the way of a directory of that name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deskfleet.errors import ConfigError
from deskfleet.model import embedded
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import POCKET, embedded_name, locate
from deskfleet.serve import default_model_id

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "v41-tiny" / "model"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from deskfleet.cli import main; sys.exit(main())",
        *arguments,
    ]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_it_is_found_from_anywhere_and_served_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path, ROOT):  # in the checkout, ./pocket is a package and no checkpoint
        monkeypatch.chdir(directory)
        assert locate(POCKET) == ROOT / "pocket" / "checkpoint"
    assert Checkpoint.open(locate(POCKET)).config.num_hidden_layers == 12
    assert default_model_id(locate(POCKET)) == "pocket"
    assert default_model_id(ROOT / "pocket" / "checkpoint") == "pocket"
    assert embedded_name(GOLDEN) is None


def test_a_checkpoint_of_that_name_in_the_working_directory_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "pocket")
    assert locate(POCKET) == Path("pocket")
    done = run("inspect", "pocket", "--json", cwd=tmp_path)
    assert (done.returncode, '"num_layers": 12' in done.stdout) == (0, False)
    assert locate("./pocket") == Path("pocket")
    assert locate("other") == Path("other")


@pytest.mark.parametrize("verb", [("inspect",), ("plan", "--nodes", "local")])
def test_verbs_take_the_name(verb: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*verb, "pocket", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pocket" in done.stdout


def test_an_installation_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PLACES", {POCKET: tmp_path / "nowhere"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="pocket is not part of this installation"):
        locate(POCKET)


@pytest.mark.slow  # builds a wheel
def test_the_wheel_carries_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "pocket" / "checkpoint", source / "pocket" / "checkpoint", copy_function=os.link)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), "."], cwd=source, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 40_000_000
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for path in (ROOT / "pocket" / "checkpoint").iterdir():
        assert (unpacked / "deskfleet" / "pocket_checkpoint" / path.name).read_bytes() == path.read_bytes()
    code = "from deskfleet.model.embedded import locate; print(locate('pocket'))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert found.stdout.strip() == str(unpacked / "deskfleet" / "pocket_checkpoint")
