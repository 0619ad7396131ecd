"""Every exception deskfleet raises on purpose. Owns messages' shape and exit codes; knows nothing else.

    DeskfleetError
    ├── ConfigError          bad file, key, flag, variable                      exit 2
    ├── CheckpointError      missing, short, corrupt or unexpected tensors      exit 3
    ├── PackError            a pack of Engram rows is damaged or not written    exit 3
    │   └── WrongPack        not of this checkpoint, or lacks columns           exit 1
    ├── DoesNotFit           the plan's verdict                                 exit 1
    ├── RequestError         one request cannot be served as asked              HTTP 400
    │   └── PromptTooLong    prompt plus output exceeds max_model_len           HTTP 400
    └── EngineError          the engine cannot go on                            exit 3, HTTP 503
        └── RankDied         a rank process ended or raised                     exit 3, HTTP 503

A message says what happened with the operands, in lower case without a full stop; `hint` says what to
do next and is printed on a line of its own.
"""

from __future__ import annotations


class DeskfleetError(Exception):
    """Base of the tree. `exit_code` is what the CLI returns (1 verdict no, 2 bad input, 3 machine or file)."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(DeskfleetError):
    """A file, key, flag or variable the user gave is wrong."""

    exit_code = 2


class CheckpointError(DeskfleetError):
    """A checkpoint on disk is missing something, or holds something it should not."""

    exit_code = 3


class PackError(DeskfleetError):
    """A pack of Engram rows is damaged, is missing a file, or cannot be written."""

    exit_code = 3


class WrongPack(PackError):
    """A sound pack of Engram rows, but of another checkpoint, or without columns that are needed."""

    exit_code = 1


class DoesNotFit(DeskfleetError):
    """The wish does not fit the machine; the message carries the arithmetic."""

    exit_code = 1


class RequestError(DeskfleetError):
    """One request cannot be served as asked. `param` names the offending field, as clients spell it."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt (plus the asked output) exceeds the context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> None:
        asked = f" plus max_tokens {max_tokens}" if max_tokens else ""
        super().__init__(
            f"prompt of {num_prompt_tokens} tokens{asked} exceeds the context of {max_model_len} tokens",
            param="max_tokens" if max_tokens and num_prompt_tokens < max_model_len else "messages",
            hint="shorten the prompt, lower max_tokens, or serve with a larger --max-model-len",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class EngineError(DeskfleetError):
    """The engine cannot go on; every running request fails with this sentence."""


class RankDied(EngineError):
    """A rank process ended or raised, and the group was taken down."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}; the group was stopped")
        self.rank = rank


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeskfleetError",
    "DoesNotFit",
    "EngineError",
    "PackError",
    "PromptTooLong",
    "RankDied",
    "RequestError",
    "WrongPack",
]
