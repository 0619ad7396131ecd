"""The exceptions of this distribution, one tree of its own: nothing here knows deskfleet.

```
EngramError
├── GeometryError     the description of the tables contradicts itself, the tokenizer, or the checkpoint   exit 3
├── HistoryError      token ids that cannot be hashed: out of range, or too little history                 exit 3
├── RowError          a row that does not exist, or that the file would not give                           exit 3
├── SourceError       a published checkpoint from which no tables can be read                              exit 3
├── FormatError       a packed file, manifest or journal that breaks the format                            exit 3
├── IdentityError     a sound pack, but of another checkpoint, column, row format or version               exit 1
├── NativeError       the native library is missing, or finds no way to read on this machine               exit 3
├── SelectionError    a rank, layers or columns that the tables do not have                                exit 2
├── ContractError     an engine, its settings or its device that a plug-in was not made for                exit 3
├── MissingRowsError  a pack that lacks columns which a rank of another engine reads                       exit 3
└── PackError         packing cannot go on                                                                 exit 3
    └── SpaceError    the pack does not fit the disk                                                       exit 1
```

Messages say what happened with the operands, in lower case without a full stop; `hint` says what to do next.
`exit_code` is what `python -m deskfleet_engram` returns (1 verdict no, 2 bad input, 3 a machine or file failed).
"""

from __future__ import annotations

from pathlib import Path


class EngramError(Exception):
    """Base of the tree."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class GeometryError(EngramError):
    """Table sizes, columns or the token map do not fit together; the message carries both numbers."""


class HistoryError(EngramError):
    """Compressed ids from which no row id can be computed."""


class RowError(EngramError):
    """A row cannot be read; the message names file or table, and row.

    Where a packed file is at fault, `path` is that file, `block` the data block within it, `row` the row
    within its column, and `kind` the word that `deskfleet_engram.verify` uses for such a fault. The native
    reader fills them for a shard too: `block` then counts 4 KiB of the file, `row` the rows of the table. It
    has three more kinds: "short" (fewer bytes came), "deadline" (none came in time), "cancelled". Otherwise
    they are None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        block: int | None = None,
        row: int | None = None,
        kind: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.block = block
        self.row = row
        self.kind = kind


class SourceError(EngramError):
    """A published checkpoint lacks a table, holds it in an unknown form, or cannot be read."""


class FormatError(EngramError):
    """Bytes that should be a packed file, a manifest or a journal are none, or are damaged."""


class IdentityError(EngramError):
    """A pack is sound but not the one asked for; the message names both sides."""

    exit_code = 1


class NativeError(EngramError):
    """The native library was asked for and cannot serve: missing, of another version, or without a backend."""


class SelectionError(EngramError):
    """A rank, layers or columns were asked for that the tables do not have, or a rank without a number of ranks."""

    exit_code = 2


class ContractError(EngramError):
    """The engine, its configuration, its device or this rank's place in it is not what the plug-in was made for."""


class MissingRowsError(EngramError):
    """The pack lacks columns that this rank reads."""


class PackError(EngramError):
    """Packing stopped: the disk or the source failed, the source changed, or another process packs."""


class SpaceError(PackError):
    """The pack does not fit the disk; the message carries both numbers."""

    exit_code = 1


__all__ = [
    "ContractError",
    "EngramError",
    "FormatError",
    "GeometryError",
    "HistoryError",
    "IdentityError",
    "MissingRowsError",
    "NativeError",
    "PackError",
    "RowError",
    "SelectionError",
    "SourceError",
    "SpaceError",
]
