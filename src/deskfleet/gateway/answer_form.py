"""What form an answer must have: the constraint of a request, and the grammar of tool calls.

Owns the shapes of `response_format`, which wishes are enforced, the spelling of calls (spec §10.5), and how a
parameter's schema becomes text. Knows nothing of prompts, tokens or protocols; the engine enforces what comes out.

* `response_format` always is, by the client's own schema. With `strict: true` its objects are closed, and a keyword
  that cannot be enforced is refused; without, such a keyword is left out.
* Strict tools are, in the same way, and a call that `tool_choice` asks for. Other calls are left to the model.

A call is written as the model was trained to write it: parameters one a line, strings as they are, all else as JSON
in one line. Under a strict schema every parameter comes, once, in the order of the schema. A string of which the
schema says more than its values (a pattern, a length) is written as JSON, which the parser reads just as well, since
only there it can be held to its schema. Calls of tools that are not strict are held to this form alone.

The publisher's parser misreads names with whitespace, quotes or backslashes, so no parameter may be called that way.
The marker that calls are made of is a token of its own, which text never contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from deskfleet.endpoint import Constraint
from deskfleet.errors import RequestError

_Schema = dict[str, Any]

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT = {"lenient": True}
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
    }
)
_SPELLABLE = re.compile(r'[^\s"\\\x00-\x1f]+')  # the parser misreads other names
_MAX_DEPTH = 16  # of references and alternatives around one value; beyond, it is JSON like any other


class Marker(NamedTuple):
    """The token that calls are made of."""

    token_id: int
    spelling: str


class CallSpelling(NamedTuple):
    """What a checkpoint calls the parts of a call; V4.1 puts a space before each."""

    calls: str
    invoke: str
    parameter: str


V41_CALLS = CallSpelling(" calls", " invoke", " parameter")
V4_CALLS = CallSpelling("tool_calls", "invoke", "parameter")


class JsonSchema(Struct, frozen=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Free text, the default."""


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON of one schema."""

    json_schema: JsonSchema


class RegexFormat(Struct, frozen=True, tag_field="type", tag="regex"):
    """Text that a regular expression matches as a whole; nothing of it is shown to the model."""

    regex: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat


class FormWishes(Struct, frozen=True, kw_only=True):
    """What a request says about the form of its answer.

    `functions` are those the prompt shows, as Chat Completions spells them. `calls_are_begun`: the prompt has opened
    the calls; `must_call`: it has not, and calls must come all the same. `answer_is_begun`: part of the answer is in
    the prompt. The `param`s are what the client calls the fields.
    """

    functions: Sequence[_Schema] = ()
    calls_are_begun: bool = False
    must_call: bool = False
    response_format: ResponseFormat | None = None
    answer_is_begun: bool = False
    param: str = "response_format"
    schema_param: str = "response_format.json_schema.schema"


def answer_constraint(
    wishes: FormWishes, marker: Marker, spelling: CallSpelling = V41_CALLS
) -> Constraint | None:
    """Return what the answer to a request must be, or None. Raises RequestError for a wish that no grammar can say."""
    functions = wishes.functions
    has_form = wishes.response_format is not None and not isinstance(wishes.response_format, TextFormat)
    if wishes.answer_is_begun and has_form:
        raise RequestError(
            f"{wishes.param}: an answer that is begun cannot be held to a form",
            param=wishes.param,
            hint=f"leave out the last message, or {wishes.param}",
        )
    if not functions:
        return response_constraint(wishes)
    calls_come = wishes.calls_are_begun or wishes.must_call
    response = None if calls_come else response_constraint(wishes)
    if response is not None and response.kind == "regex":
        raise RequestError(f"{wishes.param}: a regex cannot stand beside tools", param=wishes.param)
    if not (calls_come or response is not None or any(function.get("strict") for function in functions)):
        return None
    if wishes.answer_is_begun:
        raise RequestError(
            "tools: calls cannot be held to a form in an answer that is begun",
            param="tools",
            hint="leave out the last message, or strict",
        )
    grammar = tool_grammar(
        functions,
        marker,
        is_begun=wishes.calls_are_begun,
        must_come=wishes.must_call,
        answer=None if response is None else json.loads(response.text or '{"type": "object"}'),
        spelling=spelling,
    )
    return Constraint("grammar", grammar, "tools" if response is None else wishes.param)


def response_constraint(wishes: FormWishes) -> Constraint | None:
    """Return what `response_format` alone asks for."""
    match wishes.response_format:
        case JsonObjectFormat():
            return Constraint("json_object", param=wishes.param)
        case JsonSchemaFormat(json_schema=wanted):
            schema = _closed(wanted.schema) if wanted.strict else {**wanted.schema, "x-guidance": _LENIENT}
            return Constraint("json_schema", json.dumps(schema, ensure_ascii=False), wishes.schema_param)
        case RegexFormat(regex=regex):
            return Constraint("regex", regex, f"{wishes.param}.regex")
    return None


def _closed(node: Any) -> Any:
    """A strict schema as it is meant: objects have the properties they name and no others."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(value) for key, value in node.items()}
    return {"additionalProperties": False, **closed} if node.get("type") == "object" else closed


_FRAME = r"""%llguidance {{}}
start: {start}
calls: (call "\n")+ "</" marker "{spelling.calls}>"
call: "<" marker "{spelling.invoke} name=\"" ({choices}) "</" marker "{spelling.invoke}>"
marker: <[{marker.token_id}]>
opening: "<" marker "{spelling.calls}>\n"
parameter: "<" marker "{spelling.parameter} name=\""
end: marker "{spelling.parameter}>\n"
raw: "true\">" RAW end
any_json: "false\">" {any_json} "</" end
ANY_NAME: /[A-Za-z0-9_.$-]+/
TEXT: /(?s:.*)/ & ~/(?s:.*){marker.spelling}(?s:.*)/
TEXT_AND_OPENING: /(?s:.*)</ & ~/(?s:.*){marker.spelling}(?s:.*)/
RAW: /(?s:.*)<\// & ~/(?s:.*){marker.spelling}(?s:.*)/
"""


def tool_grammar(
    functions: Sequence[_Schema],
    marker: Marker,
    *,
    is_begun: bool,
    must_come: bool = False,
    answer: _Schema | None = None,
    spelling: CallSpelling = V41_CALLS,
) -> str:
    """Return, in llguidance's Lark, an answer that may call `functions`, given as Chat Completions sends them.

    `is_begun`: the prompt has opened the calls, so they must come; `must_come`: they must come and be opened. `answer`:
    the schema of what comes where no calls do; None is any text, and any text before calls. Raises RequestError for a
    name that calls cannot spell.
    """
    if is_begun:
        start = "calls"
    elif must_come:
        start = r'"\n\n" opening calls'
    elif answer is None:
        start = rf'TEXT | TEXT_AND_OPENING marker "{spelling.calls}>\n" calls'
    else:
        start = rf'{_json(answer, answer)} | "\n\n" opening calls'
    frame = _FRAME.format(
        start=start,
        choices=" | ".join(f"call_{index}" for index in range(len(functions))),
        marker=marker,
        any_json=_json({}, {}),
        spelling=spelling,
    )
    return frame + "".join(
        f"call_{index}: {_quote(function['name'])} {_END_OF_NAME} {_parameters(function)}\n"
        for index, function in enumerate(functions)
    )


_END_OF_NAME = r'"\">\n"'


def _parameters(function: _Schema) -> str:
    schema = function.get("parameters") or {}
    names = list(schema.get("properties", {}))
    unspellable = [name for name in names if not _SPELLABLE.fullmatch(name)]
    if not function.get("strict"):
        known = " | ".join(map(_quote, names)) if names and not unspellable else "ANY_NAME"
        return f"({_parameter(f'({known})', ['raw', 'any_json'])})*"
    if unspellable:
        raise RequestError(f"tools: a call cannot spell a parameter named {unspellable[0]!r}", param="tools")
    root = _closed(schema)
    # The publisher writes an empty line where there are no parameters.
    return " ".join(_parameter(_quote(n), _values(root["properties"][n], root)) for n in names) or r'"\n"?'


def _parameter(name: str, values: Iterable[str]) -> str:
    choices = " | ".join(dict.fromkeys(values))
    return rf'parameter {name} "\" string=\"" ({choices})'


def _values(schema: _Schema, root: _Schema, depth: int = 0) -> Iterator[str]:
    """The ways to write a value of `schema`, from what follows `string="` to the end of the line."""
    told = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    target = _resolve(told["$ref"], root) if told.keys() == {"$ref"} else None
    match told:
        case {"$ref": _} if target is not None and depth < _MAX_DEPTH:
            yield from _values(target, root, depth + 1)
        case {"anyOf": choices} if len(told) == 1 and depth < _MAX_DEPTH:
            for choice in choices:
                yield from _values(choice, root, depth + 1)
        case {"enum": values} if told.keys() <= {"enum", "type"}:
            yield from _listed(values)
        case {"const": value} if told.keys() <= {"const", "type"}:
            yield from _listed([value])
        case {"type": types} if len(told) == 1:
            names = types if isinstance(types, list) else [types]
            if "string" in names:
                yield "raw"
            if others := [name for name in names if name != "string"]:
                yield _as_json({"type": others}, root)
        case _:
            yield _as_json(schema, root)


def _listed(values: list[Any]) -> Iterator[str]:
    """The ways to write one of `values`."""
    for value in values:
        if isinstance(value, str):
            yield rf'"true\">" {_quote(value)} "</" end'
    if others := [value for value in values if not isinstance(value, str)]:
        yield _as_json({"enum": others}, {})


def _as_json(schema: _Schema, root: _Schema) -> str:
    return rf'"false\">" {_json(schema, root)} "</" end'


def _json(schema: _Schema, root: _Schema) -> str:
    """`%json` of a schema that is part of `root`: references into `root` still lead where they led."""
    options = {**_ONE_LINE, **schema.get("x-guidance", {})}
    text = json.dumps(schema, ensure_ascii=False)
    if '"$ref"' in text:
        schema = {**_moved(schema), "$defs": {"root": _moved(root)}}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _moved(node: Any) -> Any:
    """A copy whose references lead into `#/$defs/root` instead of `#`."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/root{reference[1:]}"
    return moved


def _resolve(reference: str, root: _Schema) -> _Schema | None:
    """What a JSON pointer within `root` leads to, or None."""
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node if reference.startswith("#") and isinstance(node, dict) else None


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


__all__ = [
    "V4_CALLS",
    "V41_CALLS",
    "CallSpelling",
    "FormWishes",
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "Marker",
    "RegexFormat",
    "ResponseFormat",
    "TextFormat",
    "answer_constraint",
    "response_constraint",
    "tool_grammar",
]
