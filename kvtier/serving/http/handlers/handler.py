"""What the handlers of all endpoints share: the model that is served, prompts, streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, Modality

from kvtier.hf.models.checkpoint.templates import CONTINUES, begun_text, makes_prompts, unread
from kvtier.serving.http.answers import Answers
from kvtier.serving.http.manager import EngineManager
from kvtier.serving.http.parsing import Parser, parsers_of
from kvtier.serving.http.requests.asked import Asked
from kvtier.serving.http.requests.grammars import Grammar, Grammars
from kvtier.serving.http.requests.keys import VISIT, Visit
from kvtier.serving.http.requests.lengths import check_fits, may_fit
from kvtier.serving.http.requests.refusals import Refusal, invalid, too_long
from kvtier.serving.text import bytes_of, text_of

#: The last event of a stream.
DONE = "data: [DONE]\n\n"
#: The smallest log-probability that is said.
_LEAST_LOGPROB = -9999.0


class Served(ModelManager):
    """The one model of a server, as Transformers' app asks for models.

    Args:
        name: that clients give.
        model, tokenizer: of Transformers.
        created: seconds since the epoch.
        context: tokens of a sequence, at the most; None: no limit is known.
        template: what the chat template is given besides messages, where a request says nothing else.
    """

    def __init__(
        self, name: str, model: Any, tokenizer: Any, created: int, context: int | None, template: Mapping[str, Any]
    ) -> None:
        # Not of the base class: that loads models as they are asked for.
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.created = created
        self.context = context
        self.template = template
        self.grammars = Grammars(tokenizer, model)
        self.force_model = name
        self.loaded_models = {name: model}

    def check(self, name: Any) -> None:
        """Refuse a model that is not served. Raises `Refusal`."""
        if name is not None and name != self.name:
            raise Refusal(
                404, f"There is no model {name!r} here; there is {self.name!r}.", code="model_not_found", param="model"
            )

    @property
    def entry(self) -> dict[str, Any]:
        """The model in a list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvtier",
            "max_model_len": self.context,
        }

    def process_model_name(self, model_id: str) -> str:
        """The name is that of the server."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The model, which is loaded."""
        self.check(model_id_and_revision)
        return self.model, self.tokenizer

    async def load_model_streaming(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        """The model is loaded, and there is no other."""
        known = model_id_and_revision == self.name
        state = {"status": "ready", "cached": True} if known else {"status": "error", "message": "not served here"}
        yield sse(state | {"model": model_id_and_revision})

    def shutdown(self) -> None:
        """The server gives its model up itself."""


class Handler(BaseHandler):
    """One endpoint of Transformers' app.

    Args:
        served: the model.
        manager: of its engine.
        state: of the app.

    Attributes:
        field: of a body, with the messages.
    """

    field = "messages"

    def __init__(self, served: Served, manager: EngineManager, state: Any) -> None:
        super().__init__(served, state)
        self.served = served
        self.manager = manager

    @property
    def visit(self) -> Visit:
        """The request that is being answered."""
        return VISIT.get(Visit())

    def prompt_of(self, messages: Sequence[Mapping[str, Any]], asked: Asked) -> list[int]:
        """Token ids of a chat, as the tokenizer makes them; where it makes none, contents are joined.

        Raises:
            Refusal: the template refuses the messages, or does not read what it is given.
        """
        tokenizer = self.served.tokenizer
        try:
            plain = [self._plain(message) for message in messages]
        except RecursionError:  # Transformers copies the calls of tools
            raise invalid(self.field, "the arguments of a tool call nest too deeply") from None
        try:
            ignored = unread(tokenizer, asked.tools, asked.template)  # of the server's own all are read
        except ValueError as error:
            raise self._refused(error) from error
        if ignored:
            raise Refusal(
                400, f"{ignored[0]}: the model's chat template does not read it.", code="unsupported", param=ignored[0]
            )
        if asked.continues:
            self._check_begins(plain[-1])
        if not makes_prompts(tokenizer):
            *before, last = [str(message["content"]) for message in plain]
            if asked.continues:
                asked.begun = "".join(before), last
            return self.ids_of("".join([*before, last]))
        own = {"tools": asked.tools, "add_generation_prompt": True}
        given = {**own, **self.served.template, **asked.template}
        if asked.continues:
            asked.begun = self._begun(plain, given)
            given |= CONTINUES
        try:
            if not may_fit(self.visit.size, self.served.context):  # none of its strings has more characters
                self._check_fits(tokenizer.apply_chat_template(plain, tokenize=False, **given))
            found = tokenizer.apply_chat_template(plain, tokenize=True, return_dict=True, **given)
        except Refusal:
            raise
        except Exception as error:  # of the template, which may ask for anything
            raise self._refused(error) from error
        return [int(x) for x in found["input_ids"]]

    def _check_begins(self, message: Mapping[str, Any]) -> None:
        """Refuse a last message that no answer goes on from. Raises `Refusal`."""
        if message["role"] != "assistant":
            raise invalid("continue_final_message", "the last message is not of the assistant")
        if message.get("tool_calls"):
            raise invalid("continue_final_message", "the last message has calls of tools")
        if not message["content"]:
            raise invalid("continue_final_message", "the last message is empty: leave it out")

    def _begun(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> tuple[str, str]:
        """See `begun_text`. Raises `Refusal`: the prompt does not end so."""
        try:
            return begun_text(self.served.tokenizer, messages, given)
        except (TypeError, ValueError) as error:
            # What the error says may have all that the template renders in it, a system prompt of its own too.
            raise invalid("continue_final_message", "the model's tokenizer continues no such message") from error
        except Exception as error:  # of the template, which may ask for anything
            raise self._refused(error) from error

    def _check_fits(self, text: str) -> None:
        """Refuse a text that cannot fit, or that nobody waits for. Raises `Refusal`."""
        check_fits(text, self.served.tokenizer, self.served.context, self.visit)

    def _refused(self, error: Exception) -> Refusal:
        text = f"The chat template refuses these messages: {error}"
        return Refusal(400, text, code="invalid_messages", param=self.field)

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates read it. Transformers leaves out what a message says besides its calls of tools, who
        has said it, and what the model thought."""
        given = {name: value for name, value in message.items() if name != "tool_calls"}
        calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        (plain,) = self.get_processor_inputs_from_messages([given | calls], Modality.LLM)
        if calls:
            (said,) = self.get_processor_inputs_from_messages([given], Modality.LLM)
            plain["content"] = said["content"]
        own = {name: message[name] for name in ("name", "reasoning_content") if message.get(name) is not None}
        found: dict[str, Any] = plain | own
        return found

    def ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            Refusal: ids that the model does not have, or more than fit.
        """
        if isinstance(prompt, str):
            self._check_fits(prompt)
            return [int(x) for x in self.served.tokenizer(prompt)["input_ids"]]
        context = self.served.context
        if context is not None and len(prompt) > context:
            raise too_long(context, str(len(prompt)))
        size = self.served.model.get_input_embeddings().num_embeddings
        if not all(0 <= x < size for x in prompt):
            raise invalid("prompt", f"token ids are from 0 to {size - 1}")
        return list(prompt)

    def parsers(self, ids: Sequence[int], asked: Asked) -> list[Parser | None]:
        """Of the answers to a prompt."""
        of = self.served.tokenizer, self.served.model
        return parsers_of(*of, ids, asked.tools, asked.count, plain=asked.form is not None, begun=asked.begun)

    async def grammar(self, asked: Asked, parser: Parser | None = None) -> Grammar | None:
        """What holds an answer to the schema that is asked for; None: to none.

        Args:
            parser: of the answer, that knows which thought it begins with.

        Raises:
            Refusal: there is no such thing.
        """
        if asked.form is None:
            return None
        thought = None if parser is None else parser.thought
        ends = asked.settings.get("eos_token_id")
        return await self.manager.form(self.served.grammars.of, *asked.form, ends, thought)

    def named(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> Named:
        """What a token and those that were likely at its place look like."""
        tokenizer = self.served.tokenizer
        text = text_of(tokenizer, token)
        # JSON has no number for a probability of 0.
        logprob = logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
        return Named(token, text, bytes_of(tokenizer, token, text), logprob, [self.named(*each) for each in top])


@dataclass(frozen=True)
class Named:
    """A token and its log-probability; and the likeliest ones at its place.

    Attributes:
        token: its id.
        text, bytes: that it stands for; None: of a part of a character, whose bytes are not known.
    """

    token: int
    text: str
    bytes: bytes | None
    logprob: float
    top: list[Named]

    @property
    def name(self) -> str:
        """The text, or as OpenAI writes parts of characters."""
        if self.bytes is None or self.bytes == self.text.encode():
            return self.text
        return "bytes:" + "".join(f"\\x{x:02x}" for x in self.bytes)


def usage_so_far(asked: Asked, answers: Answers) -> dict[str, Any]:
    """What a part of a stream says of what it took: nothing is known before the end, unless it is asked for."""
    return {"usage": answers.usage if asked.usage_so_far else None} if asked.usage else {}


def sse(body: Mapping[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def streamed(events: AsyncIterator[str]) -> StreamingResponse:
    """A stream, which no proxy holds back."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
