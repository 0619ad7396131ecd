"""The golden numbers are the recorded ones, all of them and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[1] / "golden" / "v41-tiny"


def test_every_file_matches_its_recorded_hash():
    manifest = json.loads((ROOT / "MANIFEST.json").read_text())
    found = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()}
    assert found - {"MANIFEST.json", "README.md"} == set(manifest)
    for name, expected in manifest.items():
        content = (ROOT / name).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (
            expected["sha256"],
            expected["bytes"],
        ), name
