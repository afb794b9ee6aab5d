"""`Prompts`: token ids of the messages of a chat, as its tokenizer makes them."""

from __future__ import annotations

import reprlib
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvtier.conversation.given.arguments import check_text, check_tokenizer, text_of
from kvtier.errors import ConfigError
from kvtier.hf.models.checkpoint.templates import CONTINUES, NOT_OF_TEMPLATES, begun_text, makes_prompts, unread

#: What a chat gives a template itself.
_OWN = NOT_OF_TEMPLATES | {"add_generation_prompt", "continue_final_message"}
#: Tokens before an answer with which it is decoded: a word may begin with the last of them.
_BEFORE = 16


class Prompts:
    """Makes prompts of messages: by a tokenizer's chat template or by code of its own; without either, contents are
    joined.

    Args:
        tokenizer: of the model.
        tools: that the model may call, as `apply_chat_template` takes them; None: none.
        given: what else the template reads, by name.
        any_tools: other messages may have tools, for which a tokenizer may have another template: that one reads all
            that is given, too.

    Raises:
        ConfigError: what makes no difference to a prompt, for the template does not read it; or is malformed; or a
            processor in place of a tokenizer.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Any] | None, given: Mapping[str, Any] | None, *, any_tools: bool = False
    ) -> None:
        check_tokenizer(tokenizer)
        if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence | None):
            raise ConfigError(f"tools={reprlib.repr(tools)}: give a list of functions, or of their JSON schemas.")
        if not isinstance(given, Mapping | None) or not all(isinstance(name, str) for name in given or ()):
            raise ConfigError(f"chat_template_kwargs={reprlib.repr(given)}: give what the template reads, by name.")
        self.tokenizer = tokenizer
        self._has_code = makes_prompts(tokenizer)
        self._options = dict(given or {})
        own = sorted(self._options.keys() & _OWN)
        if own:
            raise ConfigError(f"chat_template_kwargs has {own[0]!r}, which a chat gives itself: leave it out.")
        if self._options or tools:
            self._check_read(tools)
        if self._options and any_tools:
            self._check_read([{}], only=self._options)
        if tools:
            self._options["tools"] = list(tools)

    def _check_read(self, tools: Sequence[Any] | None, only: Container[str] | None = None) -> None:
        try:
            ignored = unread(self.tokenizer, tools, self._options) if self._has_code else [*self._options, "tools"]
            ignored = [name for name in ignored if only is None or name in only]
        except ValueError as error:  # there are several templates
            raise ConfigError(f"The tokenizer does not say which chat template is meant: {error}") from error
        if ignored:
            what = "chat template does not read it" if self._has_code else "tokenizer has no chat template"
            raise ConfigError(f"{ignored[0]}: leave it out, for the model's {what}.")

    def check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Whether they are messages of text. Raises `ConfigError`."""
        check_text(messages)

    def ids_of(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> list[int]:
        """The ids of messages; `answer`: and of what begins an answer."""
        if self._has_code:
            options = {"add_generation_prompt": answer, "tokenize": True} | self._options
            found = self.tokenizer.apply_chat_template(list(messages), **options)
            return _ids(found)
        return [int(x) for x in self.tokenizer("".join(map(text_of, messages)))["input_ids"]]

    def begun(self, messages: Sequence[Mapping[str, Any]], begin: str) -> tuple[list[int], str]:
        """The ids of messages and of how the answer to them begins, and that beginning as the model reads it: a
        template may leave out spaces around it.

        Raises:
            ConfigError: the tokenizer writes no such prompt, or another beginning.
        """
        whole = [*messages, {"role": "assistant", "content": begin}]
        if not self._has_code:
            return self.ids_of(whole), begin
        try:
            _, written = begun_text(self.tokenizer, whole, self._options)
            ids = _ids(self.tokenizer.apply_chat_template(whole, tokenize=True, **self._options, **CONTINUES))
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"begin={reprlib.repr(begin)}: the tokenizer continues no message: {error}") from error
        return ids, written

    def end_of(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """The text of an answer behind a prompt that ends within it: decoded alone, it may lack its first space."""
        before = list(prompt[-_BEFORE:])
        head, whole = self._decoded(before), self._decoded([*before, *answer])
        return whole[len(head) :] if whole.startswith(head) else self._decoded(answer)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _ids(found: Any) -> list[int]:
    """Of what a tokenizer gives."""
    return [int(x) for x in (found["input_ids"] if isinstance(found, Mapping) else found)]
