"""Answers that are JSON of a schema: llguidance says which tokens may come next, in a processor of scores."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kvtier.hf.models import generation as of
from kvtier.serving.http.parsing import Thought
from kvtier.serving.http.requests.refusals import Refusal, fault, invalid

#: White space between what JSON has: so much may come at a time. Else an unsure model writes nothing else.
_SPACE = r"[ \t\n\r]{0,32}"
_OPTIONS = {"whitespace_pattern": _SPACE}
#: Before a schema. Where a text is the only one, llguidance would have it written in the tokens of the tokenizer: where
#: that is the text of a token such as <think> or the end token, in that token, which it then takes for no text.
_WHOLE = '%llguidance {"no_forcing": true}\nstart: %json '
#: With which what llguidance says of a schema begins. It ends with the lines from `_WHOLE` on.
_PLACE = re.compile(r"^at \d+\(\d+\): ")
#: Characters of what llguidance says of a schema.
_LONGEST = 200
#: Tokens of a thought that are read at each step for its end.
_LATEST = 32


class Grammars:
    """Of one server: what its tokenizer makes of schemas.

    Args:
        tokenizer, model: of Transformers.
    """

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._lock = threading.Lock()
        self._made: Any = None

    def of(self, field: str, schema: Mapping[str, Any], ends: Any, thought: Thought | None) -> Grammar:
        """What holds answers to a schema.

        Args:
            field: of the request, that has it.
            ends: token ids by which answers end, as a request gives them; None: the model's.
            thought: that the prompt has begun, or that the model may begin the answer with. None: there is none.

        Raises:
            Refusal: a schema that is none, or has what is not supported; a tokenizer that llguidance cannot read; there
                is no llguidance.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise Refusal(400, f"{field}: this server has no llguidance. pip install llguidance.", param=field)
        from llguidance import LLMatcher

        if ends is not None and ends != self._model.generation_config.eos_token_id:
            raise invalid(field, "such an answer ends where its JSON does, by the model's own end tokens")
        tokenizer = self._of_tokenizer(field)
        try:
            grammar = LLMatcher.grammar_from_lark(_WHOLE + json.dumps(dict(schema) | {"x-guidance": _OPTIONS}))
        except (ValueError, RecursionError) as error:
            raise invalid(field, f"the schema is malformed: {error}") from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            why = _PLACE.sub("", matcher.get_error()).partition("<backtrace>")[0]
            why = " ".join(why.partition(_WHOLE.splitlines()[0])[0].removesuffix("1 | ").split())[:_LONGEST]
            raise invalid(field, f"the schema is malformed, or has what is not supported: {why}")
        return Grammar(matcher, tokenizer, field, self._tokenizer, thought)

    def _of_tokenizer(self, field: str) -> Any:
        """The tokenizer as llguidance has it, made once: it takes a second."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                ends = self._model.generation_config.eos_token_id
                if ends is None:
                    raise Refusal(400, f"{field}: this model has no token that ends an answer.", param=field)
                ends = list(ends) if isinstance(ends, Iterable) else [ends]
                try:
                    # A tokenizer may have got tokens that the model has no embeddings for.
                    size = max(len(self._tokenizer), of.vocabulary_of(self._model) or 0)
                    self._made = from_tokenizer(self._tokenizer, size, ends)
                except Exception as error:  # of what it reads, which may be anything
                    fault(error, "unsupported")  # for whoever runs the server
                    text = f"{field}: llguidance cannot read this model's tokenizer."
                    raise Refusal(400, text, code="unsupported", param=field) from error
            return self._made


class Grammar:
    """What the answers to a request are held to.

    Args:
        matcher: of llguidance, that has seen nothing.
        read: the tokenizer as llguidance has it.
        field: of the request, that asks for it.
        tokenizer: of Transformers.
        thought: see `Grammars.of`.

    Attributes:
        ends: token ids that end an answer.
        tokens_of: gives tokens of a text, for a matcher.
    """

    def __init__(self, matcher: Any, read: Any, field: str, tokenizer: Any, thought: Thought | None) -> None:
        self.matcher, self.field, self.tokenizer, self.thought = matcher, field, tokenizer, thought
        self.ends, self.tokens_of = frozenset[int](read.eos_tokens), read.greedy_tokenize

    def processor(self, prompt: int) -> GrammarProcessor:
        """Of an answer to a prompt of so many tokens."""
        return GrammarProcessor(self, prompt)


class GrammarProcessor:
    """A processor of scores: bars the tokens with which one answer would be none of its grammar. A thought that the
    answer begins with is no part of the grammar.

    Args:
        grammar: of the answer.
        seen: tokens that are none of it: the prompt's.
    """

    def __init__(self, grammar: Grammar, seen: int) -> None:
        self._grammar = grammar
        self._seen = seen
        self._matcher = grammar.matcher.deep_copy()
        thought = grammar.thought
        self._begins = () if thought is None else thought.begins  # what may come next of each mark of a thought
        self._marked = False  # whether the first tokens of one have come
        self._thought: list[int] | None = None if thought is None or thought.begins else []

    def __deepcopy__(self, memo: object) -> GrammarProcessor:
        """Of another answer to the same prompt."""
        return GrammarProcessor(self._grammar, self._seen)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[1, vocabulary]` behind ids `[1, tokens]`."""
        new = input_ids[0, self._seen :].tolist()
        self._seen += len(new)
        for token in new:
            if self._thought is not None:
                self._think(token)
            elif self._begins:
                self._begin(token)
            else:
                self._matcher.consume_token(token)
        allowed = self._allowed(scores.shape[-1])
        found = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if bool(found.isneginf().all()):  # the likeliest of none would be token 0, which may even end the answer
            raise invalid(
                self._grammar.field,
                "what else is asked bars each token that the schema allows next, as min_tokens or suppress_tokens do",
            )
        return found

    def _allowed(self, vocabulary: int) -> torch.Tensor:
        """Whether each token may come next."""
        if self._thought is not None:  # whatever it is, JSON is to follow
            allowed = torch.ones(vocabulary, dtype=torch.bool)
            allowed[list(self._grammar.ends)] = False
            return allowed
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        allowed[[each[0] for each in self._begins if each[0] < vocabulary]] = True
        return allowed if self._marked else allowed | self._of_grammar(vocabulary)

    def _of_grammar(self, vocabulary: int) -> torch.Tensor:
        """Whether each token is what the grammar has next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0]  # behind it is the state of the grammar
            raise invalid(self._grammar.field, f"the schema cannot be followed: {why}")
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        known = torch.from_numpy(np.unpackbits(bits, count=min(8 * len(bits), vocabulary), bitorder="little"))
        allowed[: len(known)] = known.bool()
        if not self._matcher.is_accepting():  # an end token that is text, such as a line break, may be part of JSON
            allowed[list(self._grammar.ends)] = False
        return allowed

    def _begin(self, token: int) -> None:
        """The answer has begun with a thought if it has begun with a mark of one."""
        left = tuple(each[1:] for each in self._begins if each[0] == token)
        self._marked = bool(left) and all(left)
        self._begins = left if self._marked else ()
        if not left:
            self._matcher.consume_token(token)
        elif not self._marked:  # the mark is whole
            self._thought = []

    def _think(self, token: int) -> None:
        """A thought is no part of the grammar, up to its end."""
        assert self._thought is not None
        assert self._grammar.thought is not None
        self._thought = [*self._thought[1 - _LATEST :], token]
        text = self._grammar.tokenizer.decode(self._thought)
        found = (x for x in self._grammar.thought.end.finditer(text) if x.end() > x.start())
        if (end := next(found, None)) is not None:
            self._thought = None
            begun = text[end.end() :].lstrip()  # in the token that ends the thought
            self._matcher.consume_tokens(self._grammar.tokens_of(begun))
