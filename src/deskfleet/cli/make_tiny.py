"""`deskfleet make-tiny`: every size is a flag, made from the fields of TinySizes, so the two cannot drift."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import parse_counts, print_json
from deskfleet.testing.tiny import TinySizes, make_tiny
from deskfleet.units import format_bytes


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("make-tiny")(_with_size_flags())


def run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="The same seed and sizes give the same bytes.")
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is already there.")
    ] = False,
    as_json: Json = False,
    **sizes: Any,
) -> None:
    """Make a small random checkpoint in the published format.

    With tokenizer, vision tower and draft stages, so that everything can be tried on a laptop; what it says
    means nothing. The flags below --json are its sizes, under their published names.
    """
    made = make_tiny(directory, seed=seed, sizes=TinySizes(**_parsed(sizes)), overwrite=overwrite)
    if as_json:
        print_json(
            {
                "path": str(made.path),
                "seed": seed,
                "num_tensors": made.num_tensors,
                "tensor_bytes": made.tensor_bytes,
            }
        )
    else:
        print(f"{made.path}: {made.num_tensors:,} tensors, {format_bytes(made.tensor_bytes)}, seed {seed}")


def _with_size_flags() -> Callable[..., None]:
    """Return `run` under a signature that has a parameter for each field of TinySizes."""

    def make(**arguments: Any) -> None:
        run(**arguments)

    signature = inspect.signature(run, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = own + [_size_flag(field) for field in fields(TinySizes)]
    make.__doc__ = run.__doc__
    make.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    make.__annotations__ = {p.name: p.annotation for p in parameters}
    return make


def _size_flag(field: Field[Any]) -> inspect.Parameter:
    """Return the flag of one size: a whole number, or several with commas for the lists of layers."""
    is_list = isinstance(field.default, tuple)
    kind: Any = str if is_list else int | None if field.default is None else int
    option = typer.Option(
        _flag(field.name),
        metavar="N,N,..." if is_list else "N",
        help="[default: laid out]" if field.default in ((), None) else "",
    )
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parsed(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the flags' values as TinySizes wants them: comma lists as tuples, an empty one for not given."""
    parsed = dict(sizes)
    for name, value in sizes.items():
        if isinstance(value, str):
            parsed[name] = parse_counts(value, _flag(name)) if value else ()
    return parsed


__all__ = ["register", "run"]
