"""`deskfleet keys`: makes, lists and revokes the keys of a server. A key is shown once, when it is made."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from deskfleet.cli.flags import Json
from deskfleet.cli.terminal import data_console, print_json, say
from deskfleet.errors import ConfigError
from deskfleet.gateway.key_file import Key, change_key_file, check_secret, make_secret, read_key_file

KeysFile = Annotated[Path, typer.Option("--file", metavar="FILE", help="The file of keys.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; metrics and logs say this name.")]
_FILE = Path("keys.toml")


def register(app: typer.Typer) -> None:
    """Add the verb, with its own verbs, to `app`."""
    verbs = typer.Typer(rich_markup_mode=None)
    verbs.callback()(keys)
    verbs.command("new")(new)
    verbs.command("list")(list_keys)
    verbs.command("revoke")(revoke)
    app.add_typer(verbs, name="keys")


def keys() -> None:
    """Make, list and revoke the keys of a server.

    The file holds names and digests; a key itself is shown once, and kept nowhere. A running server reads the file
    again on SIGHUP.
    """


def new(
    name: Name,
    file: KeysFile = _FILE,
    from_stdin: Annotated[
        bool,
        typer.Option("--from-stdin", help="Take the key from standard input instead of making one."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a key, and show it once.

    The key goes to stdout and nowhere else. One that is brought with --from-stdin is not shown again; it must have
    32 characters or more, because only a random key is safe behind a fast digest.
    """
    secret = check_secret(sys.stdin.read()) if from_stdin else make_secret()
    change_key_file(file, lambda old: old.with_key(name, secret, _now()))
    if as_json:
        print_json({"name": name, "file": str(file), "key": None if from_stdin else secret})
    elif not from_stdin:
        print(secret, flush=True)
    say(f"{name} is in {file}. A running server learns of it on SIGHUP.")


def list_keys(file: KeysFile = _FILE, as_json: Json = False) -> None:
    """List the keys by name: when each was made and revoked."""
    found = read_key_file(file).keys
    if as_json:
        for key in found:
            print_json(_object(key))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "made", "revoked"):
        table.add_column(column)
    for key in found:
        table.add_row(key.name, _shown(key.created), _shown(key.revoked))
    data_console().print(table)


def revoke(name: Name, file: KeysFile = _FILE, as_json: Json = False) -> None:
    """Revoke a key. Its name stays taken."""
    if not file.exists():
        raise ConfigError(f"there is no {file}", hint="name the file with --file")
    changed = change_key_file(file, lambda old: old.without(name, _now()))
    if as_json:
        print_json(next(_object(key) for key in changed.keys if key.name == name))
    say(f"{name} is revoked in {file}. A running server learns of it on SIGHUP.")


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _object(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "created": key.created.isoformat(),
        "revoked": None if key.revoked is None else key.revoked.isoformat(),
    }


def _shown(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M UTC")


__all__ = ["list_keys", "new", "register", "revoke"]
