"""NFS as far as it goes where the kernel has none: `exportfs` and `mount -t nfs` of nodes, on top of sshfs.

Files really come over the network: a mount hangs while a cable is cut, goes on when it is mended, and fails when the
server has died. Exports, clients and `ro` are checked as a server does; files are read as the user who logs in there.
`service nfs-kernel-server start` opens port 2049, where nobody speaks NFS. Nor is there showmount, and in /proc/mounts
the file system is `fuse.nfs4`; `df` says nfs4, and `stat -f` a disk that can be exported. Run on a node as

    nfs.py exportfs [-a] [-r] [-v] [-u CLIENT:PATH] [-o OPTIONS CLIENT:PATH]
    nfs.py mount.nfs SERVER:PATH DIRECTORY [-o OPTIONS]
    nfs.py listen
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .node import Node  # on a node this is a program of its own, without the package

_TOOLS = ("exportfs", "mount.nfs", "mount.nfs4")
_SERVICE = """\
#!/bin/sh
[ "$*" = "nfs-kernel-server start" ] || { echo "$1: unrecognized service" >&2; exit 1; }
timeout 2 bash -c 'exec 3<>/dev/tcp/127.0.0.1/2049' 2>/dev/null && exit 0
setsid {tool} listen >/dev/null 2>&1 </dev/null &
for _ in 1 2 3 4 5 6 7 8 9; do
    bash -c 'exec 3<>/dev/tcp/127.0.0.1/2049' 2>/dev/null && exit 0
    sleep 0.2
done
exit 1
"""
_DF = """\
#!/bin/bash
set -o pipefail
/usr/bin/df "$@" | sed 's/fuse[.]nfs4/nfs4/'
"""
_STAT = """\
#!/bin/bash
set -o pipefail
[ "$1" = -f ] || exec /usr/bin/stat "$@"
/usr/bin/stat "$@" | sed -E 's/overlayfs|tmpfs/ext2\\/ext3/'
"""
_TABLE = "/var/lib/nfs/etab"
_PORT = 2049
_NOT_MOUNTED = 32  # as mount(8) has it
_SSHFS = "allow_other,default_permissions,dir_cache=no,attr_timeout=1,entry_timeout=1,subtype=nfs4"
_WORD = re.compile(r'"[^"]*"\S*|\S+')


class Export(NamedTuple):
    """One client's right to one directory."""

    path: str
    client: str
    options: str

    def allows(self, path: str, address: str) -> bool:
        """Whether that client may mount that directory."""
        return Path(path).is_relative_to(self.path) and _is_client(self.client, address)


def install(node: Node) -> None:
    """Give a node the tools; those of its own are out of sight."""
    here = f"{sys.executable} {Path(__file__).resolve()}"
    for name in _TOOLS:
        node.write(f"/usr/sbin/{name}", f'#!/bin/sh\nexec {here} {name} "$@"\n', 0o755)
    node.write("/usr/sbin/service", _SERVICE.replace("{tool}", here), 0o755)
    node.shim("df", _DF)
    node.shim("stat", _STAT)


def exportfs(words: list[str]) -> int:
    """Change or show what this node exports."""
    parser = argparse.ArgumentParser("exportfs", add_help=False)
    parser.add_argument("-a", action="store_true")
    parser.add_argument("-r", action="store_true")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("-f", action="store_true")
    parser.add_argument("-u", action="store_true")
    parser.add_argument("-o", default="")
    parser.add_argument("exports", nargs="*")
    args = parser.parse_args(words)
    named = [
        Export(path, client, args.o) for client, _, path in (word.partition(":") for word in args.exports)
    ]
    table = list(_table(Path(_TABLE).read_text() if Path(_TABLE).exists() else ""))
    if args.u:
        table = [] if args.a else [row for row in table if row[:2] not in {entry[:2] for entry in named}]
    elif args.r or args.a:
        table = list(_configured()) if args.r else list({*table, *_configured()})
    elif named:
        table = [row for row in table if row[:2] not in {entry[:2] for entry in named}] + named
    else:
        print("".join(f"{row.path}\t{row.client}({row.options})\n" for row in table), end="")
    absent = [row.path for row in table if not Path(row.path).is_dir()]
    for path in absent:
        print(f"exportfs: Failed to stat {path}: No such file or directory", file=sys.stderr)
    table = [row for row in table if row.path not in absent]
    Path(_TABLE).parent.mkdir(parents=True, exist_ok=True)
    Path(_TABLE).write_text("".join("\t".join(row) + "\n" for row in table))
    return 1 if absent else 0


def mount(words: list[str]) -> int:
    """Mount what a server exports to this node."""
    parser = argparse.ArgumentParser("mount.nfs", add_help=False)
    parser.add_argument("source")
    parser.add_argument("directory")
    parser.add_argument("-o", default="")
    args, _ = parser.parse_known_args(words)
    server, _, path = args.source.partition(":")
    command = f"echo $SSH_CONNECTION; cat {_TABLE} 2>/dev/null"
    asked = subprocess.run(
        ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", server, command],
        capture_output=True,
        text=True,
    )
    if asked.returncode == 255:
        print(f"mount.nfs: {asked.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return _NOT_MOUNTED
    connection, _, table = asked.stdout.partition("\n")
    allowed = [entry for entry in _table(table) if entry.allows(path, connection.split()[0])]
    if not allowed:
        print(f"mount.nfs: access denied by server while mounting {args.source}", file=sys.stderr)
        return _NOT_MOUNTED
    is_read_only = "ro" in args.o.split(",") or "rw" not in allowed[0].options.split(",")
    options = f"{_SSHFS},{'ro' if is_read_only else 'rw'}"
    named = ("-o", f"fsname={args.source.replace(',', chr(92) + ',')}")
    # A mount is nobody's process: the end of the session that asked for it must not end its connection.
    done = subprocess.run(["setsid", "--wait", "sshfs", args.source, args.directory, "-o", options, *named])
    return _NOT_MOUNTED if done.returncode else 0


def listen() -> int:
    """Take connections at NFS's port, and say nothing."""
    with socket.create_server(("0.0.0.0", _PORT)) as server:
        while True:
            server.accept()[0].close()


def _configured() -> Iterator[Export]:
    """What /etc/exports and its directory say: a path, then clients with options."""
    for file in (Path("/etc/exports"), *sorted(Path("/etc/exports.d").glob("*.exports"))):
        for line in file.read_text().splitlines() if file.exists() else []:
            path, *clients = _WORD.findall(line.partition("#")[0]) or [""]
            if path:
                for client in clients:
                    name, _, options = client.rstrip(")").partition("(")
                    yield Export(_plain(path), name or "*", options)


def _plain(path: str) -> str:
    """A path as written in /etc/exports, without its quotes and octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path.strip('"'))


def _table(text: str) -> Iterator[Export]:
    for line in text.splitlines():
        path, client, options = line.split("\t")
        yield Export(path, client, options)


def _is_client(pattern: str, address: str) -> bool:
    if pattern == "*":
        return True
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(pattern, strict=False)
    except ValueError:
        pass
    try:
        return address in {str(info[4][0]) for info in socket.getaddrinfo(pattern, None)}
    except OSError:
        return False


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    sys.exit(listen() if verb == "listen" else exportfs(rest) if verb == "exportfs" else mount(rest))
