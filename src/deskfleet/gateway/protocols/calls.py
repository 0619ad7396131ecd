"""Calls in what a model writes, and text apart from them, whatever state the markup is in.

Owns what is made of every sequence of tags. Knows nothing of tokens, protocols or JSON answers. It stands before the
publisher's parser, which takes well-formed calls apart but loses or leaks what is not: text after a block, lone
closers, arguments that are no JSON. What comes out here is text as it was, and calls in one canonical spelling whose
marker is a secret of this process, so that nothing a model can write is taken for it.

What is made of what:

* a well-formed block                         its calls, arguments in pieces as they come
* an empty block, a lone closer               nothing; the text after it stays
* a call without the block around it          a call
* text in a block before any call             text: this was no block
* text after the last call                    dropped: no protocol has a place for it (spec §10.9)
* a tag nobody knows                          dropped; what stands around it stays
* a value marked as JSON that is none         a string; a raw newline in it is repaired
* a value not marked at all                   a string if its schema says so, JSON if it is JSON, else a string
* a parameter that comes twice                its first value
* a JSON object in place of parameters        its members as parameters
* a closer of a call or block in a value      ends the value too, as it does for the publisher's parser
* a call in a thought that then goes on       part of the thought, without its tags; else a call
* a call nobody offered tools for             dropped
* a call that the answer ends in              unfinished: never reported as a finished one

`repairs` names what was not well-formed. Everything is decided by bytes alone: however they are cut, the outcome is the
same. Back is held what may be a tag, a value that is not text until it ends, and a call within a thought.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from deskfleet.gateway.protocols.arguments import MARKER, Call, Schema
from deskfleet.gateway.protocols.markup import MORE, SPELLED, Markers, Tag, is_markup, read_tag

THOUGHT_END = "</think>"
"""How the end of a thought is told."""

_BLANK = b" \t\r\n"


class Piece(NamedTuple):
    """What becomes of the next `num_bytes` bytes: `text`, or themselves where it is None."""

    num_bytes: int
    text: str | None


class Mode(Enum):
    """Where in an answer the reader is."""

    THOUGHT = auto()
    ANSWER = auto()
    BLOCK = auto()  # in a block, between calls
    CALL = auto()  # in a call, between parameters
    TEXT_VALUE = auto()
    HELD_VALUE = auto()  # until its end shows what it is
    BODY = auto()  # JSON in place of parameters
    UNOFFERED = auto()  # in a call that is dropped
    AFTER = auto()  # after the block, or in it when no more calls are wanted
    HELD_CALL = auto()  # in a thought, until it shows whether the thought goes on


class CallReader:
    """Reads one answer. Bytes without `<` are what they are in `plain` modes.

    `markers` says what counts as markup. `tools`: the offered tools' parameter schemas by name, None when no call is
    wanted. `starts`: where the prompt has left off. `max_calls`: what comes after so many calls is dropped, and
    `is_complete` says that nothing more is needed. At the end `has_cut_call` says whether the last call that was told
    lacks its end, `ends_in_block` whether a block of calls does.
    """

    # Found by identity, for every token: an enum's hash is a call.
    plain: ClassVar[tuple[Mode, ...]] = (Mode.ANSWER, Mode.THOUGHT, Mode.TEXT_VALUE)

    def __init__(
        self,
        tools: Mapping[str, Schema] | None,
        starts: Mode = Mode.ANSWER,
        *,
        markers: Markers = SPELLED,
        max_calls: int | None = None,
    ) -> None:
        self.repairs: set[str] = set()
        self.num_calls = 0
        self.has_cut_call = False
        self.ends_in_block = False
        self._tools = tools
        self._markers = markers
        self._max_calls = max_calls
        self._mode = starts
        self._data = b""
        self._at = 0
        self._pieces: list[Piece] = []
        self._is_open = False  # the canonical block has been begun
        self._ends_in_tag = False  # what was read last was a tag that nothing came of
        self._call = Call("")
        self._trial: _Trial | None = None
        self._plain_until = 0  # tags that begin before this place were talked about in a thought

    @property
    def is_complete(self) -> bool:
        """Whether as many calls have come as may."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    @property
    def is_holding(self) -> bool:
        """Whether bytes wait for what comes after them."""
        return bool(self._data)

    def is_plain(self, data: bytes) -> bool:
        """Whether `data` is what it is, without more ado."""
        return not self._data and b"<" not in data and self._mode in self.plain and not self._ends_in_tag

    def feed(self, data: bytes) -> list[Piece]:
        """Return what can be said after `data`. Pieces cover all bytes that were fed, in order, sooner or later."""
        if self.is_plain(data):
            return [Piece(len(data), None)] if data else []
        self._data += data
        while self._at < len(self._data) and self._step():
            pass
        self._plain_until -= self._at
        self._data, self._at = self._data[self._at :], 0
        return self._take()

    def finish(self) -> tuple[list[Piece], bool]:
        """Return what is left to say at the end, and whether no call was left unfinished."""
        if self._trial is not None:
            return self._end_in_held_call(self._trial)
        rest = self._data[self._at :]
        is_text = self._mode in (Mode.THOUGHT, Mode.ANSWER) and not is_markup(rest, self._markers)
        self._put(len(rest), None if is_text else "")
        self._data, self._at = b"", 0
        in_call = self._mode in (Mode.CALL, Mode.TEXT_VALUE, Mode.HELD_VALUE, Mode.BODY)
        self.ends_in_block = in_call or self._mode is Mode.BLOCK
        if in_call:
            self.repairs.add("unfinished_call")
            self.has_cut_call = self._call.is_shown
        elif self._is_open:
            self._put(0, f"</{MARKER} calls>")
        if not self._is_open and (in_call or self._ends_in_tag) and self._mode is not Mode.THOUGHT:
            # An empty block: the publisher's parser then leaves out the empty line before it, as before any.
            self._put(0, f"\n\n<{MARKER} calls>\n</{MARKER} calls>")
        return self._take(), not in_call

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _put(self, num_bytes: int, text: str | None) -> None:
        self._at += num_bytes
        if not num_bytes and not text:
            return
        self._ends_in_tag = text is not None
        if self._pieces and (self._pieces[-1].text is None) == (text is None):
            last = self._pieces.pop()
            num_bytes, text = last.num_bytes + num_bytes, None if text is None else (last.text or "") + text
        self._pieces.append(Piece(num_bytes, text))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _step(self) -> bool:
        """Decide about the bytes at hand; False when that takes more of them."""
        if self._trial is not None:
            return self._step_in_held_call(self._trial)
        begin = self._data.find(b"<", self._at)
        if begin != self._at:
            self._read_text((len(self._data) if begin < 0 else begin) - self._at)
            return True
        tag = read_tag(self._data, self._at, self._markers)
        if tag == MORE:
            return False
        if tag is None:
            self._read_text(1)
        elif tag.name == "think":
            self._read_think(tag)
        else:
            self._read_tag(tag)
        return True

    def _read_think(self, tag: Tag) -> None:
        """The beginning or the end of a thought; what neither begins nor ends one is no text either."""
        if self._mode is Mode.THOUGHT and tag.is_closing:
            self._put(tag.num_bytes, THOUGHT_END)
            self._mode = Mode.ANSWER
        elif self._mode in (Mode.THOUGHT, Mode.ANSWER, Mode.BLOCK):
            self._put(tag.num_bytes, "")
        else:
            self._read_text(tag.num_bytes)

    def _read_text(self, num_bytes: int) -> None:
        match self._mode:
            case Mode.THOUGHT | Mode.ANSWER | Mode.TEXT_VALUE:
                self._put(num_bytes, None)
            case Mode.HELD_VALUE | Mode.BODY:
                self._call.held += self._data[self._at : self._at + num_bytes]
                self._put(num_bytes, "")
            case Mode.BLOCK | Mode.CALL:
                text = self._data[self._at : self._at + num_bytes]
                num_blank = num_bytes - len(text.lstrip(_BLANK))
                self._put(num_blank, "")
                if num_blank < num_bytes:
                    self._read_misplaced(num_bytes - num_blank)
            case _:
                if self._data[self._at : self._at + num_bytes].strip(_BLANK) and self._mode is Mode.AFTER:
                    self.repairs.add("text_after_calls")
                self._put(num_bytes, "")

    def _read_misplaced(self, num_bytes: int) -> None:
        """Text where only tags should be."""
        if self._mode is Mode.BLOCK:
            self.repairs.add("text_in_block")
            self._mode = Mode.AFTER if self.num_calls else Mode.ANSWER
        elif self._data[self._at : self._at + 1] == b"{" and self._call.is_empty:
            self._call.held.clear()
            self._mode = Mode.BODY
        else:
            self.repairs.add("text_in_call")
            self._call.is_empty = False
            self._put(num_bytes, "")

    # --- tags -----------------------------------------------------------------------------------------------------

    def _read_tag(self, tag: Tag) -> None:
        match self._mode:
            case Mode.CALL:
                self._read_tag_in_call(tag)
            case Mode.TEXT_VALUE:
                if tag.is_closing and tag.name != "other":
                    self._put(0, f"</{MARKER} parameter>\n")
                    self._close_value(tag)
                else:
                    self._put(tag.num_bytes, None)
            case Mode.HELD_VALUE:
                if tag.is_closing and tag.name != "other":
                    self._put(0, self._call.end_held_value())
                    self._close_value(tag)
                else:
                    self._read_text(tag.num_bytes)
            case Mode.BODY:
                self._read_tag_in_body(tag)
            case Mode.UNOFFERED:
                if tag.is_closing and tag.name in ("invoke", "calls"):
                    self._mode = Mode.BLOCK if tag.name == "invoke" else self._mode_after_block()
                self._put(tag.num_bytes, "")
            case Mode.THOUGHT:
                self._read_tag_in_thought(tag)
            case _:
                self._read_tag_between_calls(tag)

    def _read_tag_between_calls(self, tag: Tag) -> None:
        match tag:
            case Tag(name="calls", is_closing=False):
                self._mode = Mode.AFTER if self.is_complete else Mode.BLOCK
            case Tag(name="calls") if self._mode is Mode.BLOCK:
                self._mode = self._mode_after_block()
                if not self.num_calls:
                    self.repairs.add("empty_block")
            case Tag(name="invoke", is_closing=False) if _call_name(tag) is not None:
                if self._mode is Mode.ANSWER:
                    self.repairs.add("missing_wrapper")
                self._begin_call(tag)
                return
            case Tag(is_closing=True):
                self.repairs.add("lone_closer")
            case _:
                self.repairs.add("unknown_tag")
        self._put(tag.num_bytes, "")

    def _mode_after_block(self) -> Mode:
        return Mode.AFTER if self.num_calls else Mode.ANSWER

    def _begin_call(self, tag: Tag) -> None:
        if self._tools is None or self.is_complete:
            self.repairs.add("unwanted_call")
            self._put(tag.num_bytes, "")
            self._mode = Mode.BLOCK if tag.is_empty else Mode.UNOFFERED
            return
        name = _call_name(tag) or ""
        self._call = Call(name, self._tools.get(name))
        self._put(tag.num_bytes, "")
        self._mode = Mode.CALL
        if tag.is_empty:
            self._end_call()

    def _show_call(self) -> None:
        """Say that there is a call. Late, so that one that is cut before its arguments is none."""
        if self._call.is_shown:
            return
        self._call.is_shown = True
        opening = "" if self._is_open else f"\n\n<{MARKER} calls>\n"
        self._is_open = True
        self._put(0, f'{opening}<{MARKER} invoke name="{self._call.name}">\n')

    def _end_call(self) -> None:
        self._show_call()
        self._put(0, f"</{MARKER} invoke>\n")
        self.num_calls += 1
        self._mode = Mode.AFTER if self.is_complete else Mode.BLOCK

    def _read_tag_in_call(self, tag: Tag) -> None:
        match tag:
            case Tag(name="parameter", is_closing=False) if tag.attributes.get("name"):
                self._begin_value(tag)
                return
            case Tag(name="invoke" | "calls", is_closing=True):
                self._end_call()
                if tag.name == "calls":
                    self._mode = Mode.AFTER
            case Tag(name="invoke", is_closing=False) if _call_name(tag) is not None:
                self.repairs.add("missing_closer")
                self._end_call()
                self._begin_call(tag)
                return
            case _:
                self.repairs.add("lone_closer" if tag.is_closing else "unknown_tag")
        self._put(tag.num_bytes, "")

    def _begin_value(self, tag: Tag) -> None:
        self._put(tag.num_bytes, "")
        call = self._call
        call.begin_value(tag)
        if call.is_repeated:
            self.repairs.add("repeated_parameter")
        else:
            self._show_call()
        if call.is_text:
            self._put(0, call.opening())
            self._mode = Mode.TEXT_VALUE
        else:
            self._mode = Mode.HELD_VALUE
        if tag.is_empty:
            closer = Tag(0, "parameter", True, False, {})
            self._read_tag(closer)

    def _close_value(self, tag: Tag) -> None:
        if self._call.was_repaired:
            self.repairs.add("invalid_json")
        self._mode = Mode.CALL
        if tag.name == "parameter":
            self._put(tag.num_bytes, "")
        else:
            self.repairs.add("missing_closer")
            self._read_tag_in_call(tag)

    def _read_tag_in_body(self, tag: Tag) -> None:
        if tag.name == "other":
            self._read_text(tag.num_bytes)
            return
        self._mode = Mode.CALL
        if tag.name == "parameter":
            self.repairs.add("text_in_call")
        else:
            self.repairs.add("json_body")
            self._show_call()
            self._put(0, self._call.body())
        self._read_tag_in_call(tag)

    # --- thoughts -------------------------------------------------------------------------------------------------

    def _read_tag_in_thought(self, tag: Tag) -> None:
        begins = not tag.is_closing and (
            tag.name == "calls" or (tag.name == "invoke" and _call_name(tag) is not None)
        )
        if begins and self._tools is not None and self._at >= self._plain_until:
            self._trial = _Trial(self._tools, self._markers)
            self._mode = Mode.HELD_CALL
            return
        self.repairs.add("lone_closer" if tag.is_closing else "tag_in_thought")
        self._put(tag.num_bytes, "")

    def _step_in_held_call(self, trial: _Trial) -> bool:
        # The end of the thought may have come in two parts.
        thought_end = self._markers.thought_end
        begin = self._at + max(0, trial.num_fed - len(thought_end) + 1)
        think = self._data.find(thought_end, begin)
        trial.feed(self._data[self._at + trial.num_fed : len(self._data) if think < 0 else think])
        if trial.left_at is not None:
            self._continue_thought(self._at + trial.left_at)
        elif think >= 0:
            self._continue_thought(think)
        else:
            return False
        return True

    def _continue_thought(self, at: int) -> None:
        """The call up to `at` was talked about, not made."""
        self._trial = None
        self._mode = Mode.THOUGHT
        self.repairs.add("call_in_thought")
        self._plain_until = at

    def _end_in_held_call(self, trial: _Trial) -> tuple[list[Piece], bool]:
        self._data, self._at = b"", 0
        pieces, is_finished = trial.finish()
        self.num_calls, self.has_cut_call = trial.num_calls, trial.has_cut_call
        self.ends_in_block = trial.ends_in_block
        self.repairs |= trial.repairs
        self.repairs.add("unfinished_thought")
        return pieces, is_finished


class _Trial(CallReader):
    """Reads a call within a thought, and notices when what follows is no call any more.

    `left_at` is the number of bytes before that, None while it may still be a call that ends the answer.
    """

    plain = (Mode.TEXT_VALUE,)

    def __init__(self, tools: Mapping[str, Schema], markers: Markers) -> None:
        super().__init__(tools, markers=markers)
        self.num_fed = 0
        self.left_at: int | None = None
        self._num_told = 0
        self._told: list[Piece] = []

    def feed(self, data: bytes) -> list[Piece]:
        """Read on. What comes of it is told at the end only."""
        self.num_fed += len(data)
        for piece in super().feed(data):
            self._tell(piece)
        return []

    def finish(self) -> tuple[list[Piece], bool]:
        """Return everything, as though it had not been held."""
        pieces, is_finished = super().finish()
        return [*self._told, *pieces], is_finished

    def _tell(self, piece: Piece) -> None:
        self._num_told += piece.num_bytes
        self._told.append(piece)

    def _read_text(self, num_bytes: int) -> None:
        if self._mode in (Mode.ANSWER, Mode.AFTER, Mode.BLOCK) and self.left_at is None:
            text = self._data[self._at : self._at + num_bytes]
            if text.strip(_BLANK):
                self.left_at = self._num_told + self._at + len(text) - len(text.lstrip(_BLANK))
        super()._read_text(num_bytes)


def _call_name(tag: Tag) -> str | None:
    """The name of the tool that a tag calls, None for one that no call can have."""
    name = tag.attributes.get("name", "")
    return None if not name or '"' in name else name


__all__ = ["MARKER", "THOUGHT_END", "CallReader", "Mode", "Piece"]
