"""Tries an installed deskfleet-engram: the library loads, and a checkpoint is packed, described, verified and read.

    python tools/try_engram_wheel.py CHECKPOINT

For a wheel, in an environment that has nothing else of ours; fails when the native library is missing or the package
comes from a source tree.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import deskfleet_engram
from deskfleet_engram.source import open_source, read_rows
from deskfleet_engram.store import PackedLayer, open_store

ROWS = np.array([0, 5, 99, 5])


def run(*arguments: str | Path) -> None:
    """Run a verb of the package to its end."""
    subprocess.run([sys.executable, "-m", "deskfleet_engram", *map(str, arguments)], check=True)


def main(model: Path) -> None:
    """Pack `model` in a temporary directory and compare rows with the checkpoint's."""
    place = Path(deskfleet_engram.__file__)
    if "site-packages" not in place.parts:
        raise SystemExit(f"{place} is not an installed package")
    with tempfile.TemporaryDirectory() as name:
        pack = Path(name) / "pack"
        run("pack", model, pack)
        run("info", pack)
        run("verify", pack, "--level", "full", "--source", model)
        for table in open_source(model).tables:
            codes = np.empty((len(ROWS), table.rows.weight_bytes), np.uint8)
            scales = np.empty((len(ROWS), table.rows.scale_bytes), np.uint8)
            with open_store(PackedLayer(pack, table.layer), backend="native") as store:
                store.gather(ROWS, codes, scales)
                print(f"layer {table.layer}: {store.report}")
            if not np.array_equal(np.hstack([codes, scales]), read_rows(table, ROWS)):
                raise SystemExit(f"rows of layer {table.layer} are not the checkpoint's")
    print(f"deskfleet-engram works from {place.parent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
