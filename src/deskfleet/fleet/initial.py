"""A first fleet.toml, with comments: from addresses, from what a probe found on nodes, from the .env of a recipe.

Owns the text and how it is put on the disk: whole, and never over a file that is there. What a key may be is said by
`planner.fleetfile`; a text that it refuses is not written.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.spec import LOCAL, read_spec
from deskfleet.tomlfile import quoted

PLACE = "/srv/deskfleet"
"""Where things lie when nothing is known of a node: readable by all, written by whoever prepares it."""


@dataclass(frozen=True, slots=True)
class NodeDraft:
    """What is known of one node. `notes` become comments above it; paths where they differ from the others'."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    fabric: tuple[str, ...] = ()
    kind: str | None = None
    available_bytes: int | None = None
    checkpoint: str | None = None
    cache: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known of a fleet before its file is there. None is left to a comment that says what may stand there."""

    name: str
    nodes: tuple[NodeDraft, ...]
    model: str = "v4.1-flash"
    engine: str = "vllm"
    kind: str = "spark"
    checkpoint: str = f"{PLACE}/checkpoint"
    cache: str = f"{PLACE}/cache"
    revision: str | None = None
    image: str | None = None
    profile: str | None = None
    wishes: tuple[tuple[str, int | float], ...] = ()
    gateway: tuple[tuple[str, str | int], ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def parse_node(text: str) -> NodeDraft:
    """Read `[user@]host[:port]`, or `local`. Raises ConfigError. The node is named after its host."""
    match = re.fullmatch(r"(?:([^@\s]+)@)?(\[[0-9A-Fa-f:.%\w]+\]|[^@:\s\[\]]+)(?::(\d{1,5}))?", text)
    # Two colons and more, without brackets, are an IPv6 address and no port.
    bare = re.fullmatch(r"(?:([^@\s]+)@)?([0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*)", text)
    if bare is not None:
        user, host, port = bare[1], bare[2], None
    elif match is not None:
        user, host, port = match[1], match[2].strip("[]"), match[3]
    else:
        raise ConfigError(f"--node {text!r} is no address", hint="[user@]host[:port], or local")
    return NodeDraft(_name_of(host), host, user, None if port is None else int(port))


def with_names(nodes: Sequence[NodeDraft]) -> tuple[NodeDraft, ...]:
    """Return the nodes with names that differ: where two would have one, they are counted."""
    names: set[str] = set()
    result = []
    for number, node in enumerate(nodes, 1):
        name = node.name or f"node-{number}"
        while name.casefold() in names:
            name = f"{node.name or 'node'}-{number}" if name == node.name else f"{name}x"
        names.add(name.casefold())
        result.append(replace(node, name=name))
    return tuple(result)


def _name_of(host: str) -> str:
    """The first part of a host's name; nothing for an IP address."""
    if host == LOCAL:
        return "head"
    if ":" in host or re.fullmatch(r"[\d.]+", host):
        return ""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host.partition(".")[0]).strip("-_")[:63]


def fleet_text(draft: Draft) -> str:
    """Return the text of a fleet.toml: what is known as values, what may be said as comments."""
    parts = [
        "# A fleet of deskfleet. Every key: docs/reference/fleet-file.md. What it means, value by value:",
        "# deskfleet fleet config show --effective",
        *(f"# {note}" for note in draft.notes),
        "",
        _value("name", draft.name, "containers and state are called by it"),
        _value("profile", draft.profile, "or max-concurrency, lowest-latency", example="max-context"),
        '# share = "nfs"  # the head exports the checkpoint; "copy": each node fetches it; without: each has it',
        "",
        "[checkpoint]",
        _value("model", draft.model, "a name that deskfleet plan --model knows, or a directory here"),
        _value("revision", draft.revision, "commit that pull downloads", example="0123abc..."),
        '# origin = "https://HUB/OWNER/NAME"  # where pull downloads from; or a directory with SHA256SUMS',
        "",
        "[engine]",
        _value("name", draft.engine, "native, vllm, sglang or exl3"),
        *_image(draft.image),
        '# args = ["--flag", "value"]  # after those that deskfleet gives',
        _env(draft.env),
        "",
        "[paths]  # on every node; [nodes.paths] below a node where it differs",
        _value("checkpoint", draft.checkpoint),
        _value("cache", draft.cache, "compiled kernels, logs: a local disk"),
        f"# engram = {quoted(draft.cache + '/engram')}  # this node's Engram rows: a local, fast disk",
        "",
        "# The first node is the head: rank 0 runs there.",
        *(line for node in draft.nodes for line in _node(node, draft)),
        "[wishes]  # what is left out, the plan chooses and says why",
        *(f"{name} = {value}" for name, value in draft.wishes),
        *(
            line
            for line in ("# max_model_len = 131072", "# max_num_seqs = 4", '# margin = "2GiB"')
            if line.split()[1] not in dict(draft.wishes)
        ),
        "",
        "[gateway]  # the endpoint, on the machine where deskfleet runs",
        *(_value(name, value) for name, value in draft.gateway),
        *(
            line
            for line in ('# host = "0.0.0.0"  # with keys', "# port = 8000", '# keys = "keys.toml"')
            if line.split()[1] not in dict(draft.gateway)
        ),
        "",
        "# [restart]  # when a fleet that has served fails",
        "# backoff_s = [10, 30, 90]  # seconds before each restart; [] is none",
        "",
        "[secrets]  # references, never values: env:NAME is a variable here, file:PATH a file of mode 600",
        *(_value(name, value) for name, value in draft.secrets),
    ]
    if not draft.secrets:
        parts += [
            '# hf_token = "env:HF_TOKEN"',
            '# origin_token = "env:HF_TOKEN"  # what pull sends to the origin',
        ]
    return "\n".join(parts) + "\n"


def write_fleet(path: Path, text: str) -> None:
    """Write a file that is not there yet: whole or not at all. Raises ConfigError for a text that means nothing.

    Raises ConfigError too when `path` is there; it is then as it was.
    """
    if os.path.lexists(path):
        raise _is_there(path)
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".toml", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(beside, 0o644)
            try:
                read_spec(Path(beside))
            except ConfigError as error:
                raise ConfigError(error.message.replace(beside, str(path)), hint=error.hint) from None
            os.link(beside, path)  # a rename would replace what somebody else wrote meanwhile
        finally:
            os.unlink(beside)
    except FileExistsError:
        raise _is_there(path) from None
    except OSError as error:
        raise DeskfleetError(f"cannot write {path}: {error.strerror or error}") from error


def _is_there(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is there already, and was left as it is", hint="give another name with --file"
    )


def _value(key: str, value: str | int | None, comment: str = "", *, example: str = "") -> str:
    shown = (
        "" if value is None and not example else value if isinstance(value, int) else quoted(value or example)
    )
    return f"{'# ' if value is None else ''}{key} = {shown}{f'  # {comment}' if comment else ''}"


def _env(env: Sequence[tuple[str, str]]) -> str:
    if not env:
        return '# env = { NCCL_DEBUG = "INFO", HF_TOKEN = "${secret:hf_token}" }'
    return f"env = {{ {', '.join(f'{name} = {quoted(value)}' for name, value in env)} }}"


def _image(image: str | None) -> list[str]:
    hint = "docker images --digests says it"
    lines = [_value("image", image, hint, example="registry/name@sha256:...")]
    if image is not None and "sha256:" not in image:
        lines.append(
            "allow_tag = true  # each node may have another image by this tag: better give its digest"
        )
    return lines


def _node(node: NodeDraft, draft: Draft) -> list[str]:
    fabric = f"[{', '.join(map(quoted, node.fabric))}]"
    lines = [
        *(f"# {note}" for note in node.notes),
        "[[nodes]]",
        _value("name", node.name),
        _value("address", node.address),
        *([_value("user", node.user)] if node.user is not None else []),
        *([_value("port", node.port)] if node.port is not None else []),
        f"fabric = {fabric}  # on the fast network; ranks meet at the first"
        if node.fabric
        else f"# fabric = [{quoted('192.168.100.1')}]  # its addresses on the fast network, when that is another",
        _value("kind", node.kind or draft.kind),
        '# available = "108GiB"  # free before anything starts; without it, what its kind has'
        if node.available_bytes is None
        else f"available = {node.available_bytes}  # {node.available_bytes / 2**30:.1f} GiB, free now",
    ]
    own = [("checkpoint", node.checkpoint), ("cache", node.cache)]
    if any(value is not None for _, value in own):
        lines += ["[nodes.paths]", *(_value(name, value) for name, value in own if value is not None)]
    return [*lines, ""]


__all__ = ["PLACE", "Draft", "NodeDraft", "fleet_text", "parse_node", "with_names", "write_fleet"]
