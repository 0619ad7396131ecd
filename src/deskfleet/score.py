"""Teacher-forced logits as a file: how two configurations of a model are compared, number by number.

Owns the two file formats and that the result appears complete or not at all. The engine does the work.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from deskfleet.engine.llm import LLM
from deskfleet.errors import ConfigError
from deskfleet.model.device import Device

LOGITS_KEY = "logits"


@dataclass(frozen=True, slots=True)
class Score:
    """What was written: float32 [T, V] under the key `logits`, and the hash of the whole file."""

    path: Path
    shape: tuple[int, int]
    sha256: str
    seconds_s: float


def read_token_ids(path: Path) -> list[int]:
    """Return the token ids in a JSON file that holds one list of whole numbers. Raises ConfigError."""
    try:
        token_ids = msgspec.json.decode(path.read_bytes(), type=list[int])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is not a JSON list of token ids: {error}", hint="it should look like [0, 17, 42]"
        ) from error
    if not token_ids:
        raise ConfigError(f"{path} holds no token ids")
    return token_ids


def score_to_file(
    checkpoint: Path,
    token_ids: list[int],
    output: Path,
    *,
    tp_size: int = 1,
    chunk: int | None = None,
    engram_pack: Path | None = None,
    engram_second_source: bool = False,
    device: Device = "cpu",
    graphs: bool = True,
) -> Score:
    """Run `token_ids` through the model and write the logits of every position to `output`.

    `chunk` is how many tokens go through in one step; None takes them all at once. Row i ranks the token after
    position i. The other options are those of EngineOptions. Raises ConfigError for an output that cannot be written
    (before anything is loaded), and what the engine raises.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk} is less than 1")
    _check_output(output)
    begin = time.monotonic()
    with LLM(
        checkpoint,
        tp_size=tp_size,
        max_num_seqs=1,
        max_num_batched_tokens=chunk or len(token_ids),
        engram_pack=engram_pack,
        engram_second_source=engram_second_source,
        device=device,
        graphs=graphs,
    ) as llm:
        logits = llm.score(token_ids)
    data = save({LOGITS_KEY: np.ascontiguousarray(logits, dtype=np.float32)})
    _write_whole(output, data)
    rows, columns = logits.shape
    return Score(output, (rows, columns), hashlib.sha256(data).hexdigest(), time.monotonic() - begin)


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise ConfigError(f"{output} is a directory", hint="name a file")
    if not output.parent.is_dir():
        raise ConfigError(f"there is no directory {output.parent}", hint="make it first")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"cannot write into {output.parent}")


def _write_whole(path: Path, data: bytes) -> None:
    """Write beside `path`, then rename: a reader sees the old file or the new one, never a part."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


__all__ = ["LOGITS_KEY", "Score", "read_token_ids", "score_to_file"]
