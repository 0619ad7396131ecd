"""A request's body, read strictly: what all protocols that generate share.

Owns how a body becomes a struct, how a mistake in it is named, and the fields that sample. Which other fields exist is
each protocol's own affair (`protocols/*_fields.py`). Knows nothing of prompts, tokens or the engine. Everything wrong
is a RequestError whose `param` is the field as the client spelled it.

A field that the publisher's library would drop without a word is decided on, in one of three ways:

* **Honoured:** the fields of the protocol's struct. Where a client gives temperature, top_p, top_k, min_p or seed, its
  value is used as it is; the library would force temperature 1 in thinking mode, lift top_p to 0.95 there and drop it
  elsewhere.
* **Refused:** unless the value asks for nothing (`n: 1`, `bad_words: []`).
* **Ignored:** what changes nothing here (`user`, `metadata`), and every field nobody here has heard of, because
  front-ends send all kinds of extras to every server that speaks a protocol. A name that is nearly a known one
  (`temprature`) is a mistake and refused with the nearest name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.thinking import EffortConfig, Reasoning, TemplateFields, Thinking, TokenBudget

Unit = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, frozen=True, kw_only=True):
    """How tokens are chosen, in every protocol. None means that the client said nothing.

    Protocols that lack one of these in their own documents take it too: it is the same server behind all of them.
    """

    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


class ConversationFields(SamplingFields, frozen=True, kw_only=True):
    """What every protocol with a conversation takes besides: thinking, as `thinking.SPELLINGS` lists it."""

    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateFields | None = None
    reasoning: bool | Reasoning | None = None
    reasoning_effort: str | int | float | None = None
    output_config: EffortConfig | None = None
    thinking_budget: TokenBudget | None = None
    thinking_token_budget: TokenBudget | None = None


REFUSED: dict[str, tuple[object, str]] = {
    "n": (1, "one choice per request"),
    "best_of": (1, "one choice per request"),
    "use_beam_search": (False, "sampling only"),
    "length_penalty": (1, "there is no beam search to weigh"),
    "bad_words": ([], "bad_words is not supported"),
    "min_tokens": (0, "min_tokens is not supported"),
    "prompt_logprobs": (0, "prompt log probabilities are not supported"),
    "include_stop_str_in_output": (False, "stop strings are never part of the answer"),
    "skip_special_tokens": (True, "control tokens are never part of the answer"),
    "truncate_prompt_tokens": (None, "prompts are never shortened"),
}
"""Refused in every protocol: field -> (the value that asks for nothing, why anything else is refused). Null always asks
for nothing."""

IGNORED: dict[str, str] = {
    "user": "a name for the vendor's records",
    "metadata": "notes for the vendor's records",
    "service_tier": "there is one tier",
    "safety_identifier": "a name for the vendor's records",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_retention": "prefixes are kept while there is room",
}
"""Ignored in every protocol: field -> why that is no loss."""

FieldsT = TypeVar("FieldsT", bound=Struct)


@dataclass(frozen=True)
class Decisions(Generic[FieldsT]):
    """What one protocol does with which field. `choices`: how a choice's path ends -> its values."""

    fields: type[FieldsT]
    refused: Mapping[str, tuple[object, str]] = field(default_factory=lambda: REFUSED)
    ignored: Mapping[str, str] = field(default_factory=lambda: IGNORED)
    choices: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def exact(self) -> msgspec.json.Decoder[FieldsT]:
        """Reads a body that holds honoured and ignored fields only, at once; it knows nothing of any other."""
        ignored = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in self.ignored]
        exact = msgspec.defstruct(
            self.fields.__name__,
            ignored,
            bases=(self.fields,),
            frozen=True,
            kw_only=True,
            forbid_unknown_fields=True,
        )
        return msgspec.json.Decoder(exact)

    @property
    def known(self) -> tuple[str, ...]:
        """Every field that something was decided for."""
        return (*self.fields.__struct_fields__, *self.refused, *self.ignored)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises RequestError: not JSON, not an object."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {lower_first(str(error))}") from error
    if not isinstance(raw, dict):
        raise RequestError("the body is not a JSON object")
    return raw


def read_fields(body: bytes | dict[str, Any], decisions: Decisions[FieldsT]) -> FieldsT:
    """Return the checked fields of a request body.

    Raises RequestError: not JSON, not an object, a field missing, of the wrong type, out of range, refused, misspelled.
    """
    if isinstance(body, bytes):
        try:
            return decisions.exact.decode(body)  # as most
        except (msgspec.MsgspecError, RecursionError):
            pass  # what is wrong, or not known, is looked for below
    raw = read_object(body) if isinstance(body, bytes) else body
    _refuse(raw, decisions)
    try:
        return msgspec.convert(raw, decisions.fields, str_keys=True)  # the keys of logit_bias are token ids
    except (msgspec.ValidationError, RecursionError) as error:
        raise _name_field(error, decisions.choices) from error


def _refuse(raw: dict[str, Any], decisions: Decisions[Any]) -> None:
    for name, value in raw.items():
        if value is None or name in decisions.fields.__struct_fields__ or name in decisions.ignored:
            continue
        if name in decisions.refused:
            neutral, reason = decisions.refused[name]
            # True == 1 in Python, but `n: true` is no way to say `n: 1`.
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise RequestError(f"{name}: {reason}", param=name, hint=f"leave {name} out")
        elif nearest := difflib.get_close_matches(name, decisions.known, n=1, cutoff=0.85):
            raise RequestError(f"unknown field {name!r}", param=name, hint=f"did you mean {nearest[0]!r}?")


def _name_field(error: Exception, choices: Mapping[str, str]) -> RequestError:
    """Turn msgspec's "Expected ... - at `$.messages[0].role`" into an error that names messages[0].role."""
    # A key of logit_bias is "at `key` in `$.logit_bias`", a value of it "at `$.logit_bias[...]`".
    reason, _, location = str(error).replace("`key` in ", "").partition(" - at `$")
    param = location.rstrip("`").lstrip(".").removesuffix("[...]")
    if missing := re.search(r"missing required field `(\w+)`", reason):
        param = f"{param}.{missing[1]}" if param else missing[1]
        reason = "this field is required"
    elif unknown := re.search(r"contains unknown field `(\w+)`", reason):
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        reason = "this field is not supported"
    elif values := next((text for suffix, text in choices.items() if param.endswith(suffix)), None):
        reason = f"{reason}, known are {values}"
    return RequestError(f"{param}: {lower_first(reason)}", param=param or None)


def refuse_logprobs_alone(logprobs: bool | None, top_logprobs: int | None) -> None:
    """Raise RequestError when alternatives are asked for without log probabilities."""
    if top_logprobs is not None and not logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")


def lower_first(text: str) -> str:
    """Return `text` with a small first letter, unless it begins with an abbreviation."""
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


__all__ = [
    "IGNORED",
    "REFUSED",
    "ConversationFields",
    "Decisions",
    "SamplingFields",
    "StopString",
    "StopStrings",
    "StreamOptions",
    "TokenCount",
    "TokenId",
    "TopLogprobs",
    "lower_first",
    "read_fields",
    "read_object",
    "refuse_logprobs_alone",
]
