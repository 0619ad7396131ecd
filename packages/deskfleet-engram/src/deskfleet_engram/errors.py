"""The exceptions of this distribution, one tree of its own: nothing here knows deskfleet.

```
EngramError
├── GeometryError     the description of the tables contradicts itself, the tokenizer, or the checkpoint
├── HistoryError      token ids that cannot be hashed: out of range, or too little history
└── RowError          a row that does not exist, or that the file would not give
```

Messages say what happened with the operands, in lower case without a full stop.
"""

from __future__ import annotations


class EngramError(Exception):
    """Base of the tree."""


class GeometryError(EngramError):
    """Table sizes, columns or the token map do not fit together; the message carries both numbers."""


class HistoryError(EngramError):
    """Compressed ids from which no row id can be computed."""


class RowError(EngramError):
    """A row cannot be read; the message names file or table, and row."""


__all__ = ["EngramError", "GeometryError", "HistoryError", "RowError"]
