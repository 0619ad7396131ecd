"""What the SGLang adapter's tests share: an installed plug-in, scenarios, and what must come of them."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "adapters" / "deskfleet-sglang"
MODEL = ROOT / "tests" / "golden" / "v41-tiny" / "model"

SWITCHES = {
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1",
    "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": "per_rank",
}
RANKS = [(tp_size, rank) for tp_size in (1, 2, 3, 4) for rank in range(tp_size)]


def scenario(name: str, pack: Path, **others: Any) -> dict[str, Any]:
    """One rank of one, with the plug-in asked for."""
    env = {**SWITCHES, "DESKFLEET_ENGRAM_PACK": str(pack), **others.pop("env", {})}
    return {"name": name, "env": env, "tp_size": 1, "rank": 0, **others}


def install_by_hand(directory: Path) -> None:
    """What pip writes that SGLang looks for: the entry points of the project file."""
    project = tomllib.loads((ADAPTER / "pyproject.toml").read_text())["project"]
    info = directory / "deskfleet_sglang-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deskfleet-sglang\nVersion: 0.1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_scenarios(
    python: str,
    paths: list[Path],
    scenarios: list[dict[str, Any]],
    out: Path,
    *,
    model: Path = MODEL,
    wheels: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> dict[str, Any]:
    """Outcomes by name; arrays lie in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    request = {
        "model": str(model),
        "out": str(out),
        "wheels": None if wheels is None else str(wheels),
        "scenarios": scenarios,
    }
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "DESKFLEET_"))
    }
    done = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).with_name("sglang_driver.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, paths)), **(env or {})},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check_rows(out: Path, name: str, tp_size: int, rank: int) -> int:
    """Compare a rank's rows with SGLang's own table, bit by bit; return how many were its own."""
    stock, found = np.load(out / "stock.npz"), np.load(out / f"{name}.npz")
    config = json.loads((MODEL / "config.json").read_text())
    num_own = 0
    for position in range(2):
        ids, rows = stock[f"ids{position}"], stock[f"layer{position}"]
        first, end = own_range(config.get("text_config", config), position, tp_size, rank)
        is_own = (ids >= first) & (ids < end)
        expected = np.where(is_own[..., None], rows, 0)
        np.testing.assert_array_equal(found[f"layer{position}"], expected)
        assert rows.any(axis=-1).mean() > 0.99, "the tables themselves must not be zeros"
        num_own += int(is_own.sum())
    return num_own


def own_range(config: dict[str, Any], position: int, tp_size: int, rank: int) -> tuple[int, int]:
    """Rows of whole columns, in order; primes counted here and not taken from what is tested."""
    drawn: set[int] = set()
    for _ in config["engram_layer_ids"][: position + 1]:
        sizes = []
        for _ in range(config["engram_max_ngram_size"] - 1):
            prime = config["engram_vocab_size"] - 1
            for _ in range(config["engram_n_heads"]):
                prime += 1
                while prime in drawn or any(prime % k == 0 for k in range(2, int(prime**0.5) + 1)):
                    prime += 1
                drawn.add(prime)
                sizes.append(prime)
    each = len(sizes) // tp_size
    assert sum(sizes) == config["engram_num_embeddings"][position]
    return sum(sizes[: rank * each]), sum(sizes[: (rank + 1) * each])
