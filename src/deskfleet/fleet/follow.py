"""A container from its start to its end, seen over ssh: its log line by line, and how it ended.

Owns what happens when the connection is lost: nothing, for the rank has a connection of its own. It is taken up again,
and the log goes on where it was. What was read lies in a file here, and is there when the container is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deskfleet.fleet.launch import RankLaunch
from deskfleet.fleet.remote import NodeUnreachable, Remote, RemoteFailed

_AGAIN_S = 2.0
_MARK = "deskfleet-ended"
_GONE = "gone"

_FOLLOW = f"""\
docker logs --timestamps --follow ${{2:+--since "$2"}} "$1" 2>&1
docker wait "$1" >/dev/null 2>&1
format='{_MARK} {{{{.State.ExitCode}}}} {{{{.State.OOMKilled}}}}'
docker inspect --type container --format "$format" "$1" 2>/dev/null && exit
docker version >/dev/null 2>&1 && echo {_MARK} {_GONE}
exit 0
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A container has ended. `code` is that of its process, None when the container was removed by somebody."""

    rank: int
    node: str
    container: str
    code: int | None
    is_out_of_memory: bool = False

    @property
    def sentence(self) -> str:
        """What happened to it."""
        if self.code is None:
            return f"somebody removed the container {self.container}"
        reason = ", out of memory" if self.is_out_of_memory else ""
        return f"the container {self.container} ended with {self.code}{reason}"


async def follow(
    remote: Remote, rank: RankLaunch, container_id: str, log: Path, on_line: Callable[[int, str], None]
) -> Ended:
    """Follow a container to its end. `on_line` is told the rank and each line, without docker's time."""
    since = ""
    with log.open("a", encoding="utf-8", errors="replace") as file:
        while True:
            with contextlib.suppress(NodeUnreachable, RemoteFailed):
                async with contextlib.aclosing(remote.stream(_FOLLOW, container_id, since)) as lines:
                    async for line in lines:
                        if line.startswith(_MARK):
                            return _ended(rank, line)
                        stamp, _, text = line.partition(" ")
                        if stamp <= since:
                            continue  # docker repeats the last line
                        since = stamp if stamp[:1].isdigit() else since
                        file.write(line + "\n")
                        file.flush()
                        on_line(rank.rank, text)
            await asyncio.sleep(_AGAIN_S)


def _ended(rank: RankLaunch, line: str) -> Ended:
    words = line.split()
    if words[1:] == [_GONE]:
        return Ended(rank.rank, rank.node, rank.container, None)
    return Ended(rank.rank, rank.node, rank.container, int(words[1]), words[2] == "true")


def last_lines(log: Path, num_lines: int | None) -> list[str]:
    """The end of a log as it was captured; None is all of it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]


__all__ = ["Ended", "follow", "last_lines"]
