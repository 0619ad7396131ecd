"""The slow lane: the proofs that are run on a borrowed device, as they are run there, over a device that is played.

Kernels are the engines' own, cut out of their wheels: neither engine is imported. See `proof_driver`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from adapters_env import INSTALL_S, PYTHON, ROOT, WHEELS, environment, make_engines

from deskfleet_engram.bench import sample

PROVE_S = 300

KERNELS = {
    "vllm": WHEELS / "vllm" / "vllm" / "models" / "deepseek_v41" / "common" / "engram.py",
    "sglang": WHEELS / "sglang" / "sglang" / "kernels" / "ops" / "embeddings" / "engram_gather.py",
}

pytestmark = [pytest.mark.slow, pytest.mark.adapters]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both published layers, small, made as `python -m deskfleet_engram.bench.sample` makes them."""
    make_engines()
    place = tmp_path_factory.mktemp("proof")
    assert sample.main([str(place), "--size", "0.01"]) == 0
    return place


def prove(engine: str, kernel: Path, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(str(PYTHON), "-W", "ignore", str(ROOT / "tests" / "adapters" / "proof_driver.py")),
            *(engine, str(kernel), str(place / "pack"), str(place / "model"), "6"),
        ],
        env=environment(ROOT / "adapters" / f"deskfleet-{engine}" / "src", TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROVE_S,
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_proof_compares_every_step_and_then_fails_as_it_must(engine: str, place: Path) -> None:
    done = prove(engine, KERNELS[engine], place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 steps of 6 x 24 rows of layers 1+14, twice each: all equal by the callback store" in done.stdout
    assert done.stdout.count("so a step waits") == 2
    assert re.search(
        r"a read that fails .*\(after \d good.*L\d\d/c\d\d\.egp.*Input/output error", done.stdout
    )


@pytest.mark.parametrize(
    ("engine", "group"), [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")]
)
def test_pip_installs_the_plugin_alone_and_removes_all_of_it(engine: str, group: str, tmp_path: Path) -> None:
    """In an environment of its own, as an engine's image is one."""
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", image], check=True, timeout=INSTALL_S)
    site = next((image / "lib").glob("python3*")) / "site-packages"
    shutil.copytree(ROOT / "adapters" / f"deskfleet-{engine}", tmp_path / "source")
    before = files_in(site)

    def pip(python: Path | str, *words: str) -> None:
        command = [str(python), "-m", "pip", words[0], "-qq", "--disable-pip-version-check", *words[1:]]
        subprocess.run(command, check=True, timeout=INSTALL_S, cwd=tmp_path)

    def entry_points() -> str:
        asked = f"import importlib.metadata as m; print([e.value for e in m.entry_points(group={group!r})])"
        command = [str(image / "bin" / "python"), "-c", asked]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    pip(sys.executable, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "./source")
    assert entry_points() == "[]"
    pip(image / "bin" / "python", "install", "--no-index", "--no-deps", *map(str, tmp_path.glob("*.whl")))
    assert entry_points().startswith(f"['deskfleet_{engine}")
    added = files_in(site) - before
    assert {path.parts[0].split("-")[0] for path in added} == {f"deskfleet_{engine}"}
    pip(image / "bin" / "python", "uninstall", "--yes", f"deskfleet-{engine}")
    assert entry_points() == "[]"
    assert files_in(site) == before


def files_in(directory: Path) -> set[Path]:
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_whole_layers_generate_the_same_tokens_or_say_so(place: Path, is_spoilt: bool) -> None:
    """vLLM's own Engram layers, out of its file; spoilt, the store now and then gives one row that is another's."""
    done = subprocess.run(
        [
            *(str(PYTHON), "-W", "ignore", str(ROOT / "tests" / "adapters" / "generate_driver.py")),
            *(str(KERNELS["vllm"]), str(place / "pack"), str(place / "model"), "3"),
            *(["spoil"] if is_spoilt else []),
        ],
        env=environment(ROOT / "adapters" / "deskfleet-vllm" / "src", TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROVE_S,
    )
    if is_spoilt:
        assert done.returncode != 0
        assert "staged: the rows of layer 14 are not those of the stock table" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "3 tokens of 4 requests, without graphs: rows, logits and tokens by the staged store equal"
        in done.stdout
    )
    assert re.search(r"with tables of zeros, [1-9]\d* of 12 tokens are others", done.stdout)
    assert (
        done.stderr.count("let through by allow_untested") == 2
    )  # one function of vLLM's is not in that file
    assert "get_accelerator_view_from_cpu_tensor" in done.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_kernel_proves_nothing(engine: str, place: Path, tmp_path: Path) -> None:
    text = KERNELS[engine].read_text()
    assert "<< 23" in text
    (tmp_path / "kernel.py").write_text(text.replace("<< 23", "<< 22"))
    done = prove(engine, tmp_path / "kernel.py", place)
    assert done.returncode == 3
    assert "_kernel is " in done.stderr
