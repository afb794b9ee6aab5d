"""What a chat template reads, and who renders it, so that what is not read is refused and not ignored."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

#: Parameters of every `apply_chat_template` that say what a prompt is.
_OF_PROMPTS = frozenset(("tools", "documents", "add_generation_prompt"))

#: Arguments of `apply_chat_template` that no caller of a chat gives among those of its template.
NOT_OF_TEMPLATES = frozenset(
    ("tokenize", "return_dict", "return_tensors", "chat_template", "messages", "conversation", "tools")
)


#: With which `apply_chat_template` ends a prompt within its last message.
CONTINUES = {"add_generation_prompt": False, "continue_final_message": True}


def is_processor(tokenizer: Any) -> bool:
    """Whether it is a processor, which makes inputs of images and sounds too. Their module takes long to import; where
    nobody has, there is none."""
    module = sys.modules.get("transformers.processing_utils")
    return module is not None and isinstance(tokenizer, module.ProcessorMixin)


def makes_prompts(tokenizer: Any) -> bool:
    """Whether it makes a prompt of messages: by a chat template, or by code of its own, as that of mistral-common does,
    which has no template."""
    return bool(getattr(tokenizer, "chat_template", None)) or _has_own_code(tokenizer)


def _has_own_code(tokenizer: Any) -> bool:
    theirs = PreTrainedTokenizerBase
    return isinstance(tokenizer, theirs) and type(tokenizer).apply_chat_template is not theirs.apply_chat_template


def begun_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[str, str]:
    """A prompt that ends within its last message: its text before that message, and what of the message it ends with,
    for a template may leave out spaces around it.

    Args:
        tokenizer: that makes prompts, see `makes_prompts`.
        messages: the content of the last one, a string, is how the answer begins.
        options: what the template is given besides.

    Raises:
        ValueError: the prompt ends with something else, or the template leaves nothing of the message: the prompt would
            end within what begins an answer. Others are of the tokenizer, which continues no message.
    """
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **{**options, **CONTINUES})
    begin = messages[-1]["content"]
    for written in (begin, begin.rstrip(), begin.lstrip(), begin.strip()):
        if written and isinstance(text, str) and text.endswith(written):
            return text.removesuffix(written), written
    raise ValueError("it does not end a prompt with it")


def template_of(tokenizer: Any, tools: Sequence[Any] | None) -> str:
    """The chat template that a tokenizer renders with these tools; "": it has none.

    Raises:
        ValueError: it has several, and none of them is the default.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    found: str = tokenizer.get_chat_template(tools=tools)
    return found


def names_taken(tokenizer: Any, template: str) -> frozenset[str]:
    """What changes a prompt besides messages: what the tokenizer's template reads, or, without one, parameters of its
    own code. Not how ids are returned, cut or padded: that is no part of a chat."""
    if template or not _has_own_code(tokenizer):
        return names_read(template)
    usual = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - _OF_PROMPTS
    own = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return frozenset(x.name for x in own if x.kind is not x.VAR_KEYWORD and x.name not in usual)


def unread(tokenizer: Any, tools: Sequence[Any] | None, names: Iterable[str]) -> list[str]:
    """Which of what is given besides messages changes no prompt of a tokenizer: tools, and others by name.

    Raises:
        ValueError: as of `template_of`.
    """
    read = names_taken(tokenizer, template_of(tokenizer, tools))
    return [name for name in (*names, *(("tools",) if tools else ())) if name not in read]


@functools.lru_cache(16)
def names_read(template: str) -> frozenset[str]:
    """The variables that a template reads: not those that it only sets, nor words of its text and comments.

    Of one that cannot be parsed these are all its words. Transformers, whose environment with its own tags parses it
    here, then says what is wrong with it.
    """
    try:
        environment = chat_template_utils._compile_jinja_template(template).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except (TemplateError, ImportError, AttributeError, TypeError):
        return frozenset(re.findall(r"[^\W\d]\w*", template))
