"""That every test which docs/concepts/determinism.md names is there to be run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "determinism.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a module."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE.read_text(encoding="utf-8")))))
def test_the_page_names_a_test_that_exists(file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


def test_every_claim_names_a_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.endswith("| shown by |")]
    assert len(claims) > 10
    for claim in claims:
        assert NAMED.search(claim.rpartition(" | ")[2]), claim
