"""`deskfleet profile`: where the time of a step went, from traces of torch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import print_json, say
from deskfleet.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("profile")(run)


def run(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Chrome traces of torch's profiler, a rank each, or a directory."
        ),
    ],
    kernels: Annotated[
        int, typer.Option("--kernels", metavar="N", min=0, help="Kernels to list of each rank.")
    ] = 12,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the steps into this SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a step went, rank by rank.

    By category, idle time included, so that the parts add up to the step; kernels, gaps, collectives, and who waits for
    whom and for Engram rows. `deskfleet bench engine --trace DIR` records traces of the native engine.
    """
    from deskfleet.bench.trace.page import Profile, as_svg, as_text
    from deskfleet.bench.trace.page import as_json as profile_json
    from deskfleet.bench.trace.read import read_traces

    profile = Profile.of(read_traces(_files(traces)))
    if plot is not None:
        try:
            plot.write_text(as_svg(profile), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {plot}: {error.strerror or error}") from error
        say(f"wrote {plot}")
    if as_json:
        print_json(profile_json(profile, num_kernels=kernels))
    else:
        print(as_text(profile, num_kernels=kernels), end="")


def _files(paths: list[Path]) -> list[Path]:
    """Return the files named, a directory's traces in its place. Raises ConfigError for a directory without any."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
            if not inside:
                raise ConfigError(f"{path} holds no traces", hint="they end in .json or .json.gz")
            found += inside
        else:
            found.append(path)
    return found


__all__ = ["register"]
