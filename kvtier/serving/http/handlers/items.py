"""Items of a response, and the events by which a stream tells of them."""

from __future__ import annotations

from typing import Any

from kvtier.serving.http.answers import Part
from kvtier.serving.http.handlers.handler import sse

#: Of items that have a text: what their ids begin with, and what their text is called.
_OF_TEXT = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}
#: What a text of a kind has besides, in a part and in an event.
_IN_PARTS: dict[str, dict[str, Any]] = {"output_text": {"annotations": []}}
_IN_EVENTS: dict[str, dict[str, Any]] = {"output_text": {"logprobs": []}}


class Items:
    """Items of a response, in the order in which the model writes them. One at most is open: the last one.

    Args:
        name: of the response, for the ids of its items.

    Attributes:
        done: those that are whole.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._events = 0
        self._open = ""
        self._text = ""
        self.done: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> str:
        """The next event."""
        number, self._events = self._events, self._events + 1
        return f"event: {kind}\n" + sse({"type": kind, "sequence_number": number} | fields)

    def put(self, part: Part) -> list[str]:
        """Events of a part of the answer."""
        if part.call is not None:
            return self._call(part.call.name, part.call.arguments)
        return self._say("reasoning", part.reasoning) + self._say("message", part.text)

    def end(self, status: str = "completed") -> list[str]:
        """Events of the end. A response has a message, which may be empty, unless it calls.

        Args:
            status: of the response, and of the item that is open.
        """
        says = self._open == "message" or any(item["type"] in ("message", "function_call") for item in self.done)
        return self._close(status) if says else self._close(status) + self._begin("message") + self._close(status)

    def _say(self, kind: str, text: str) -> list[str]:
        if not text:
            return []
        events = [] if self._open == kind else self._close() + self._begin(kind)
        self._text += text
        return [*events, self._of_text("delta", delta=text)]

    def _begin(self, kind: str) -> list[str]:
        self._open = kind
        return [self._of_item("added", self._item("in_progress", [])), self._of_part("added")]

    def _close(self, status: str = "completed") -> list[str]:
        if not self._open:
            return []
        events = [self._of_text("done", text=self._text), self._of_part("done")]
        item = self._item(status, [self._part])
        events.append(self._of_item("done", item))
        self.done.append(item)
        self._open = self._text = ""
        return events

    def _call(self, name: str, arguments: str) -> list[str]:
        events, at = self._close(), len(self.done)
        item = {
            "id": f"fc_{self._name}_{at}",
            "call_id": f"call_{self._name}_{at}",
            "type": "function_call",
            "name": name,
        }
        where = {"item_id": item["id"], "output_index": at}
        whole = item | {"arguments": arguments, "status": "completed"}
        events += [
            self._of_item("added", item | {"arguments": "", "status": "in_progress"}),
            self.event("response.function_call_arguments.delta", delta=arguments, **where),
            self.event("response.function_call_arguments.done", arguments=arguments, name=name, **where),
            self._of_item("done", whole),
        ]
        self.done.append(whole)
        return events

    def _of_item(self, what: str, item: dict[str, Any]) -> str:
        return self.event(f"response.output_item.{what}", output_index=len(self.done), item=item)

    def _of_part(self, what: str) -> str:
        return self.event(f"response.content_part.{what}", part=self._part, **self._where)

    def _of_text(self, what: str, **fields: Any) -> str:
        kind = _OF_TEXT[self._open][1]
        return self.event(f"response.{kind}.{what}", **fields, **_IN_EVENTS.get(kind, {}), **self._where)

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        of_kind: dict[str, Any] = {"role": "assistant"} if self._open == "message" else {"summary": []}
        item = {"id": self._where["item_id"], "type": self._open, "status": status, "content": content}
        return item | of_kind

    @property
    def _part(self) -> dict[str, Any]:
        kind = _OF_TEXT[self._open][1]
        return {"type": kind, "text": self._text} | _IN_PARTS.get(kind, {})

    @property
    def _where(self) -> dict[str, Any]:
        """The text of the open item."""
        at = len(self.done)
        return {"item_id": f"{_OF_TEXT[self._open][0]}_{self._name}_{at}", "output_index": at, "content_index": 0}
