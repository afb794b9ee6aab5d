"""What a model writes to what it says: text, thoughts, calls of tools. Transformers' parser, which never fails."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.cli.serving.utils import ResponseParser, get_response_template

Event = dict[str, Any]

#: Fields of a template that are thoughts, as Transformers' server reads them.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
#: What begins and ends a thought in models that Transformers has no template for. Only tokens of the tokenizer count.
_MARKS = (
    ("<think>", "</think>"),  # DeepSeek R1, GLM, SmolLM 3, and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("◁think▷", "◁/think▷"),  # Kimi
)
#: With which an answer begins in prompts of such models, where that is not a token alone: a token and text.
_HEADERS = ("<|im_start|>assistant", "<seed:bos>assistant")
#: A pattern of nothing, as of where an answer begins in a prefix that is all of it.
_NOWHERE = "(?!)"


@dataclass(frozen=True)
class Thought:
    """The thought that an answer begins with, and that no schema holds.

    Attributes:
        end: a pattern of what ends it.
        begins: token ids; with each of these sequences the model may begin it; (): the prompt has begun it.
    """

    end: Any
    begins: tuple[tuple[int, ...], ...] = ()


def parsers_of(
    tokenizer: Any,
    model: Any,
    ids: Sequence[int],
    tools: Any,
    count: int = 1,
    *,
    plain: bool = False,
    begun: tuple[str, str] | None = None,
) -> list[Parser | None]:
    """The parsers of several answers to a prompt, which is decoded and read once. None: nothing is known of how this
    model marks what it writes, or all that is said is text.

    Args:
        ids: of the prompt, with whose end an answer may have begun.
        tools: whose schemas say of what types arguments are.
        count: of answers.
        plain: all is text, whatever it looks like, but for what the prompt has begun, or else the thought that the
            answer begins with.
        begun: the text of the prompt before the beginning that the client gives the answer, and that beginning; None:
            it gives none.
    """
    template = get_response_template(tokenizer, model)
    if template is None:
        first = _of_marks(tokenizer, ids, begun)
        if first is None:
            return [None] * count
    else:
        spec, prompt = _loaded(template), tokenizer.decode(list(ids))
        if spec.start_anchor_re.search(prompt) is None:
            # Transformers would read all of the chat as a part of the answer.
            prompt = tokenizer.decode(list(ids[_beginning(tokenizer, spec, ids) :]))
        first = Parser(spec, prefix=prompt, tools=tools)
    if plain:
        if first.begun is not None:
            first.read_no_more()
        elif (made := _thinks_first(tokenizer, first)) is not None:
            first = made
        else:
            return [None] * count
    return [first, *(first.copy() for _ in range(count - 1))]


def _added(tokenizer: Any) -> dict[int, Any]:
    """The tokens that are not of the vocabulary's own, by id; mistral-common's tokenizers name none."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def _loaded(template: Any) -> Any:
    """A template as parsers read it."""
    return ResponseParser(template, prefix="")._spec


def _of_marks(tokenizer: Any, ids: Sequence[int], begun: tuple[str, str] | None = None) -> Parser | None:
    """The parser of a model that Transformers has no template for: where its tokenizer has the marks of thoughts as
    tokens of their own, an answer may begin with a thought, and all else is text. None: it has none.

    Args:
        ids: of the prompt. Only what is at its end counts, for marks may be in what a user writes.
        begun: see `parsers_of`.
    """
    added = _added(tokenizer)
    tokens = {str(token) for token in added.values()}
    marks = next((marks for marks in _MARKS if tokens.issuperset(marks)), None)
    if marks is None:
        return None
    # The first token begins a prompt, and not an answer.
    last = next((at for at in range(len(ids) - 1, 0, -1) if ids[at] in added), None)
    tail = "" if last is None else tokenizer.decode(list(ids[last:])).strip()
    begin, end = marks
    # A mark counts when something has come behind it: until then its pattern might go on.
    if begun is not None:
        prefix = _marked(*begun, begin, end)
    elif tail == begin:
        prefix = f"{begin}\n"
    elif tail == end:
        prefix = f"{begin}\n{end}\n"
    elif last is None or tail in _HEADERS or tail == tokenizer.decode([ids[last]]).strip():
        prefix = ""
    else:
        prefix = "…"  # some text, whatever it is
    parser = Parser(_template(*marks), prefix=prefix)
    parser.silent = _unread(tokenizer, parser, added)
    return parser


def _marked(before: str, begun: str, begin: str, end: str) -> str:
    """An answer that the client begins, with the marks that the template has written before that. An empty thought of
    the template's is not the answer's where the client begins another one."""
    before = before.rstrip()
    if before.endswith(begin):
        return f"{begin}\n{begun}"
    if before.endswith(end) and not begun.lstrip().startswith(begin):
        return f"{begin}\n{end}\n{begun}"
    return begun


@functools.cache
def _template(begin: str, end: str) -> Any:
    """Of a model whose answers may begin with a thought, between two marks. Behind that they are text, whatever is in
    it: the mark may be spelt there by tokens that are text, as where a model is asked about it."""
    thoughts = {"open_pattern": rf"\A\s*{re.escape(begin)}", "close": end, "content": "text"}
    fields = {"thinking": thoughts, "content": {"content": "text"}}  # the name that every version knows
    return _loaded({"start_anchor_pattern": _NOWHERE, "fields": fields})


def _thinks_first(tokenizer: Any, parser: Parser) -> Parser | None:
    """The parser of an answer that is text, and that the model may begin with a thought. None: it may not. The prompt
    has begun the answer with something else, as with a thought that is over, or the mark is not known to be a token,
    and a model that does not think would be let off its schema by the text of the mark.

    Args:
        parser: that has read the prompt.
    """
    field = next((x for name, x in parser._spec.fields.items() if name in _THOUGHTS), None)
    if field is None or field.open_re is None or field.close_re is None or parser._buffer.strip():
        return None
    begins = _begins(tokenizer, field)
    if not begins:
        return None
    leads = {"open_pattern": rf"\A(?:{field.open_re.pattern})", "transform": "{content}"}
    first = _loaded({"start_anchor_pattern": _NOWHERE, "fields": {field.name: leads}}).fields[field.name]
    made = Parser(_only(parser._spec, replace(field, open_re=first.open_re, open_literals=None)), prefix="")
    made.thought = Thought(field.close_re, begins)
    made.silent = parser.silent
    return made


def _only(spec: Any, field: Any) -> Any:
    """A template as another one, but all that is not in this field of it is text."""
    plain: dict[str, Any] = {"close_re": None, "content": "text", "content_args": {}, "join": None, "transform": None}
    text = replace(field, name="content", open_re=None, **plain)
    return replace(spec, fields={field.name: field, text.name: text}, implicit=text.name)


def _begins(tokenizer: Any, field: Any) -> tuple[tuple[int, ...], ...]:
    """The tokens of what begins a field, where the first one is a token of its own."""
    added = _added(tokenizer)
    found = {(x,) for x, token in added.items() if field.open_re.fullmatch(str(token))}
    for text in field.open_literals or ():
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if ids and ids[0] in added and tokenizer.decode(list(ids)) == text:
            found.add(ids)
    return tuple(sorted(found))


def _beginning(tokenizer: Any, spec: Any, ids: Sequence[int]) -> int:
    """Where an answer begins in a prompt without the mark that a template knows: behind the last token that a chat is
    marked up with, and that the template does not read. So what a user writes begins no region of the answer. Without
    such a token: with the one at the end of the prompt that begins a region, if there is one."""
    added, last = _added(tokenizer), len(ids) - 1
    for at in range(last, 0, -1):  # the first token begins a prompt, and not an answer
        if ids[at] in added and not _reads(spec, tokenizer.decode([ids[at]])):
            return at + 1
    while last > 0 and not tokenizer.decode([ids[last]]).strip():
        last -= 1
    return last if last > 0 and _reads(spec, tokenizer.decode([ids[last]])) else len(ids)


def _reads(spec: Any, text: str) -> bool:
    """Whether a region of a template begins or ends with what is in this text."""
    marks = [mark for each in spec.fields.values() for mark in (each.open_re, each.close_re) if mark]
    return any(found.end() > found.start() for mark in marks for found in mark.finditer(text))


def unread_ends(tokenizer: Any, parser: Any, ends: Any) -> frozenset[int]:
    """Of the tokens that end an answer the special ones that its parser does not read: to it they would be text.
    Transformers' template of a family names the end tokens of its first models, and others end with their own.

    Args:
        parser: None: of an answer that is all text, which has no special tokens.
        ends: a token id, or several, as a client gives them; None: there are none. What is no token id is refused
            where the request is begun.
    """
    if parser is None:
        return frozenset()
    given = {x for x in (ends if isinstance(ends, (list, tuple)) else [ends]) if isinstance(x, int)}
    return parser.silent | _unread(tokenizer, parser, given)


def _unread(tokenizer: Any, parser: Parser, given: Iterable[int]) -> frozenset[int]:
    """Of some tokens the special ones that a parser does not read."""
    # Special tokens are among those that were added. A client may name any number of others.
    there = _added(tokenizer).keys() & set(given)
    return frozenset(
        x
        for x in there
        if not tokenizer.decode([x], skip_special_tokens=True) and not parser.reads(tokenizer.decode([x]))
    )


class Parser(ResponseParser):
    """Transformers' parser of one answer, for whatever a model writes.

    A call that cannot be read, here or by who is to take it, is text of the answer, as the model wrote it. The end of
    an answer closes what is open, also a thought or a call. What the prompt has begun of the answer tells what is open,
    and is no part of what is said.

    Attributes:
        thoughts: where in the text that was fed thoughts are, from one character to before another, in order. Whoever
            counts them takes them away.
    """

    _spec: Any
    #: That the answer begins with, where all else is text; None: there is none, or more than text is read.
    thought: Thought | None = None
    #: Special tokens that are no text though a parser reads special ones.
    silent: frozenset[int] = frozenset()

    def __init__(self, template: Any, *, prefix: str, tools: Any = None) -> None:
        self._region: int | None = None  # where the open region begins in the buffer, while nothing of it has been said
        self._own = 0  # where the model's own text does
        self.thoughts: list[tuple[int, int]] = []
        super().__init__(template, prefix=prefix, tools=tools)
        self._own = len(self._buffer)
        self.initial_events: list[Event] = []
        self.thoughts.clear()  # those are the prompt's

    def copy(self) -> Parser:
        """Another one, of another answer, that is where this one is."""
        same = (self._spec, self._tool_params)  # only read
        return copy.deepcopy(self, {id(x): x for x in same})

    @classmethod
    def instead_of(cls, other: Any) -> Parser:
        """That goes on where Transformers' own parser is, which is not used from then on."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(other), initial_events=[], _region=0, _own=len(other._buffer), thoughts=[])
        return made

    @property
    def read_to(self) -> int:
        """Characters that were fed and are told: behind them may be the beginning of a mark."""
        return int(self._pos - self._own)

    @property
    def begun(self) -> Any:
        """What ends the region, as a thought, that the prompt has begun, a pattern; None: what comes next is text."""
        field = None if self._current in (None, "content", self._implicit_name) else self._spec.fields[self._current]
        return None if field is None else field.close_re

    def read_no_more(self) -> None:
        """The region that the prompt has begun ends as ever. All behind it is text, whatever is in that."""
        self.thought = Thought(self.begun)
        self._spec = _only(self._spec, replace(self._spec.fields[self._current], open_re=None))
        self._implicit_name = self._spec.implicit

    def reads(self, text: str) -> bool:
        """Whether a region begins or ends with what is in this text."""
        return _reads(self._spec, text)

    def finalize(self) -> tuple[dict[str, Any], list[Event]]:
        """See `ResponseParser`. Fields that the template requires may be missing: the rest is said all the same."""
        events: list[Event] = []
        self._process(events, eos=True)
        return self._output, events

    def _watchlist(self) -> list[tuple[str, Any]]:
        watched: list[tuple[str, Any]] = super()._watchlist()
        text = self._text
        return watched if text is None or self._current == self._implicit_name else [*watched, ("close", text)]

    def _accumulate(self, events: list[Event], text: str) -> None:
        known = len(events)
        super()._accumulate(events, text)
        for event in events[known:]:
            if event["type"] == "region_chunk":  # it begins where the buffer has been read to
                event["text"] = text[max(0, self._own - self._pos) :]
                if event["field"] in _THOUGHTS and event["text"]:
                    end = self.read_to + len(text)
                    self.thoughts.append((end - len(event["text"]), end))
                self._region = self._region if event["dirty"] else None

    def _open_explicit(self, events: list[Event], field: Any, match: Any) -> None:
        self._region = match.start()
        super()._open_explicit(events, field, match)

    def _close_current(self, events: list[Event]) -> None:
        known = len(events)
        try:
            super()._close_current(events)
            if len(events) > known and events[-1]["field"] == "tool_calls":
                events[known:] = [_closed(call) for call in _calls(events[-1]["value"])]
        except Exception:  # of what a model wrote, which may be anything
            events[known:] = [{"type": "region_chunk", "field": "content", "text": self._raw, "dirty": False}]
            self._reset_to_implicit()

    @property
    def _raw(self) -> str:
        """What was not said of the open region as the model wrote it, without what ends the answer."""
        if self._region is None:
            return ""
        written: str = self._buffer[max(self._region, self._own) : self._pos]
        return written if self._text is None else self._text.close_re.sub("", written)

    @property
    def _text(self) -> Any:
        """The field of what is in no region, which ends where the answer does; None: the template has none."""
        field = self._spec.fields.get(self._implicit_name)
        return None if field is None or field.close_re is None else field


def _closed(call: Any) -> Event:
    return {"type": "region_close", "field": "tool_calls", "value": call}


def _calls(value: Any) -> list[dict[str, Any]]:
    """The calls of a region, each with a name and a JSON object of arguments: what the server takes in a message, too.

    Raises:
        Exception: they have other shapes.
    """
    return [{"function": _function(call["function"])} for call in (value if isinstance(value, list) else [value])]


def _function(given: Any) -> dict[str, str]:
    name, arguments = given["name"], given.get("arguments")
    name.encode()  # a half of a surrogate pair could not be sent
    found = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(found, dict):
        raise TypeError("arguments are a JSON object")
    return {"name": name, "arguments": json.dumps(found, allow_nan=False)}
