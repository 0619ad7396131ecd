"""Asks an engine's own parser, inside the environment that `engine_parsers.sh` makes. Not part of the package.

    PYTHON tools/engine_parsers.py vllm|sglang DIRECTORY names        its options and variables, as JSON
    PYTHON tools/engine_parsers.py vllm|sglang DIRECTORY parse        reads a JSON list of argument lists, says what
                                                                      each is parsed to, or its error

Neither engine's wheel is meant for a machine without an accelerator: what they insist on is pretended here, and only
arguments are parsed.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import json
import re
import sys
import types
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any


class _Whatever(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Pretended(types.ModuleType):
    """A module that has every class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Whatever(name, (), {})


def _pretend(*names: str) -> None:
    for name in names:
        module = _Pretended(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def _check_speculation(parsed: argparse.Namespace) -> None:
    """vLLM reads this one as any JSON; its keys and words are looked at only when a model is there."""
    import dataclasses
    import typing

    from vllm.config.speculative import SpeculativeConfig

    hints = typing.get_type_hints(SpeculativeConfig)
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    for key, value in (parsed.speculative_config or {}).items():
        if key not in fields:
            raise ValueError(f"--speculative-config has no {key}")
        words = _words(hints[key])
        if words and value not in words:
            raise ValueError(f"--speculative-config {key} is {value}, not one of {words}")


def _check_algorithm(parsed: argparse.Namespace) -> None:
    """SGLang takes any word here, and looks it up when it starts."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.from_string(parsed.speculative_algorithm)


def _words(hint: Any) -> tuple[Any, ...]:
    """The words that a type allows, of all literals in it; none when it allows any."""
    import typing

    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(word for part in typing.get_args(hint) for word in _words(part))


def _vllm(directory: Path) -> tuple[argparse.ArgumentParser, list[str]]:
    sys.path[:0] = [str(directory / "vllm"), str(directory / "extra")]
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    from vllm import envs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False)), list(envs.environment_variables)


def _sglang(directory: Path) -> tuple[argparse.ArgumentParser, list[str]]:
    sys.path[:0] = [str(directory / "sglang"), str(directory / "extra")]
    transforms = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    _pretend("IPython", "IPython.display", "torchvision", "torchvision.io")
    _pretend(*(f"torchvision.{name}" for name in transforms))
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    text = "".join(path.read_text(errors="replace") for path in (directory / "sglang").rglob("*.py"))
    return parser, re.findall(r"\bSGLANG_[A-Z0-9_]+\b", text)


def _names(parser: argparse.ArgumentParser, variables: list[str]) -> dict[str, Any]:
    return {
        "options": [
            {"names": list(action.option_strings), "takes_value": action.nargs != 0}
            for action in parser._actions
            if action.option_strings
        ],
        "variables": sorted(set(variables)),
    }


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            parsed = parser.parse_args(argv)
            if hasattr(parsed, "speculative_config"):
                _check_speculation(parsed)
            if hasattr(parsed, "speculative_algorithm"):
                _check_algorithm(parsed)
    except (SystemExit, argparse.ArgumentError, argparse.ArgumentTypeError, ValueError) as error:
        return {"error": f"{complaint.getvalue()}{error}"}
    return {"parsed": {name: _plain(value) for name, value in vars(parsed).items()}}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)


def main() -> None:
    """Answer on stdout with one line of JSON, after whatever the engine prints there."""
    engine, directory, verb = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    parser, variables = {"vllm": _vllm, "sglang": _sglang}[engine](directory)
    if verb == "names":
        answer: Any = _names(parser, variables)
    else:
        answer = [_parse(parser, argv) for argv in json.load(sys.stdin)]
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
