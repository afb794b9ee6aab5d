"""`Conversation`: a history with a name, in a `ConversationStore`."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch

from kvtier.conversation.calls.reuse import RowReuse
from kvtier.conversation.disk.rows.pieces import Written
from kvtier.conversation.given.arguments import check_beginning, check_count, message_of, role_of
from kvtier.conversation.given.prompts import Prompts
from kvtier.conversation.index import common, packed
from kvtier.conversation.kept.ranks import rank_of
from kvtier.conversation.saved.wake import Wake
from kvtier.errors import ClosedError, ConcurrentUseError, ConfigError
from kvtier.eviction.rank import DEFAULT, Rank
from kvtier.frames import is_running
from kvtier.hf.models import generation as of

#: A message of a chat, as templates take it.
Message = dict[str, Any]


class Names(Protocol):
    """What a conversation asks of the conversations of its store; see `Conversations`."""

    def add(self, made: Conversation) -> None:
        """A conversation is that of its name, which is free."""

    def changed(self, chat: Conversation, *, generated: bool = False) -> None:
        """A conversation went on, by this thread's last call or in another way."""

    def went_on(self, chat: Conversation) -> None:
        """A conversation went on by an engine, and is saved soon."""

    def rank(self, chat: Conversation, was: Rank) -> None:
        """A conversation has another rank than it had."""

    def remove(self, chat: Conversation) -> None:
        """Forget the name of a conversation."""


class Store(Protocol):
    """What a conversation asks of its store; see `ConversationStore`."""

    model: Any

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def conversations(self) -> Names:
        """All of them, by name."""

    @property
    def reuse(self) -> tuple[RowReuse, ...]:
        """What each row of this thread's last call began with."""

    def generate_turn(self, turn_of: str | None, /, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """As `model.generate`, as a turn of the conversation of a name."""

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Nobody closes it within."""

    def park(self, ids: Sequence[int], *, salt: Any = None) -> None:
        """Let what is kept of these tokens leave the device."""

    def drop(self, ids: Sequence[int], start: int, stop: int, *, salt: Any = None) -> None:
        """Give up what is kept of some of these tokens."""

    def wake(self, ids: Sequence[int], *, salt: Any = None, timeout: float | None = None) -> Wake:
        """Bring what is kept of these tokens nearer."""


class Conversation:
    """The token ids, and the messages, of one conversation. Its keys and values are the store's, found by these ids:
    what is edited, forked or rewound needs nothing else.

    Any thread may change it, or look at it, and no lock is taken for that: what changes together is changed, and read,
    by one call of C. So who forks or saves it meanwhile has no half of a turn, and neither has it after an interrupt;
    and whoever changes a part leaves the others as they are by then.

    Attributes:
        name: in the store.
        salt: of its calls.
        ids: token ids of the last call, prompt and answer, without padding on the left.
        messages: of a chat, so far, where `send` was used.
        ends: tokens of the history after so many messages: what a rewound chat still refers to.
        reuse: what the last call began with; None before the first, and where it was read from the disk.
        rank: see `pinned`, `priority` and `ttl`.
        used: when it went on last, seconds of `time.time`.
        written: what of it is on the disk, for the next save.
    """

    def __init__(self, store: Store, name: str, salt: Any = None) -> None:
        self.store = store
        self.name = name
        self.salt: Any = salt
        self.ids: list[int] = []
        self.messages: list[Message] = []
        self.ends: Mapping[int, int] = {}
        self.reuse: RowReuse | None = None
        self.closed = False
        self.rank = DEFAULT
        self.used = time.time()
        self.written = Written()
        # Under 0, the thread that generates and its frame: taken and signed in one step, so that an interrupt leaves
        # nobody else's.
        self._inside: dict[int, tuple[int, FrameType]] = {}

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """As `ConversationStore.generate`, of one row: the whole history, or an edited one.

        Raises:
            ConfigError: more than one row, or several sequences.
            ConcurrentUseError: another thread is generating with this conversation, or this one is: a streamer or a
                stopping criterion of a call may not begin another one.
        """
        self._check_open()
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        self._enter(sys._getframe())
        try:
            with self.store.in_use():  # until what it is now is saved
                out, ids = self._generate(inputs, kwargs)
                self._now(ids=ids, reuse=self.store.reuse[0])
                self.store.conversations.changed(self, generated=True)
                return out
        finally:
            self._inside.clear()

    def _enter(self, call: FrameType) -> None:
        """Let a call of this thread go on with the conversation, and no other until `_inside` is cleared."""
        me = threading.get_ident(), call
        other = self._inside.setdefault(0, me)
        if other[0] != me[0]:
            raise ConcurrentUseError(
                f"Another thread is generating with conversation {self.name!r}. Wait for its end, or `fork` it."
            )
        if other is not me:
            if is_running(other[1]):
                raise ConcurrentUseError(
                    f"This thread is generating with conversation {self.name!r} already: what is called from within "
                    "that, as a streamer or a stopping criterion is, may go on with a `fork` only."
                )
            self._inside[0] = me  # that call was interrupted, before it could say that it ends

    def _now(self, **history: Any) -> None:
        """It went on, and its history is this."""
        vars(self).update(history, used=time.time())

    def _said(self) -> tuple[list[int], list[Message], Mapping[int, int]]:
        """Its ids, messages and ends."""
        history = vars(self).copy()
        return history["ids"], history["messages"], history["ends"]

    def _generate(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> tuple[Any, list[int]]:
        """What the store gives, and the history with it."""
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if isinstance(ids, torch.Tensor) and ids.shape[:1] != (1,):
            raise ConfigError(
                f"A conversation has one row, `[1, tokens]`, and was given {list(ids.shape)}: use store.generate for "
                "several."
            )
        if (of.setting("num_return_sequences", self.store.model, kwargs) or 1) > 1:
            raise ConfigError("A conversation has one answer: use store.generate for several.")
        out = self.store.generate_turn(self.name, inputs, salt=self.salt, **kwargs)
        rows = out if isinstance(out, torch.Tensor) else out.sequences
        if rows.shape[0] != 1:
            return out, self.ids
        pad = 0
        if isinstance(ids, torch.Tensor) and not self.store.model.config.is_encoder_decoder:
            pad = ids.shape[1] - self.store.reuse[0].prompt  # no part of the history: nothing is kept, or found, by it
        return out, rows[0, pad:].tolist()

    def went_on(self, ids: Sequence[int]) -> None:
        """Its history is this now: an engine has generated with it. Nobody waits until that is saved."""
        self._check_open()
        self._now(ids=list(ids))
        self.store.conversations.went_on(self)

    def send(
        self,
        message: str | Message,
        *,
        tokenizer: Any,
        system: str | None = None,
        begin: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Say something and get the answer. The prompt is made by the tokenizer: by its chat template or by code of its
        own; without either, contents are joined.

        Args:
            message: of the user, or a message with a role of its own (of a tool). Text only.
            tokenizer: of the model; of one with a processor, `processor.tokenizer`.
            system: the first message of a new conversation.
            begin: how the answer begins, such as "{" or "Sure, "; the model goes on from there, as with
                `continue_final_message` of `apply_chat_template`. What is returned and kept is the whole answer. It is
                a part of the prompt: a streamer that skips that is given what follows.
            tools: that the model may call, as `apply_chat_template` takes them; the answer has the calls as the model
                writes them. Those of one turn: give them again in the next.
            chat_template_kwargs: what else the chat template reads, such as `{"enable_thinking": False}`; of one turn,
                too.
            kwargs: as `generate` takes them: `streamer`, `max_new_tokens`, ...

        Raises:
            ConfigError: what the chat template does not read; a beginning that it does not end a prompt with, or of an
                encoder-decoder's answer.
            KVTierError: as of `generate`; the conversation is as it was.
        """
        self._check_open()
        self._enter(sys._getframe())
        try:
            prompts = Prompts(tokenizer, tools, chat_template_kwargs)
            return self._send(list(self.messages), message, prompts, system, begin, kwargs)
        finally:
            self._inside.clear()

    def _send(
        self,
        messages: list[Message],
        message: str | Message,
        prompts: Prompts,
        system: str | None,
        begin: str | None,
        kwargs: Any,
    ) -> str:
        """Say something behind these messages, which take the place of those that there are."""
        if system is not None:
            if messages:
                raise ConfigError("system= is the first message of a conversation, and this one has begun.")
            messages.append({"role": "system", "content": system})
        messages.append(message_of(message))
        prompts.check(messages)
        is_of_encoder = self.store.model.config.is_encoder_decoder
        check_beginning(begin, is_of_encoder)
        prompt, answer = prompts.begun(messages, begin) if begin else (prompts.ids_of(messages), "")
        if not prompt:
            raise ConfigError("The prompt has no tokens: the message is empty, and the tokenizer adds none to it.")
        ids = torch.tensor([prompt], device=of.device_of(self.store.model))
        if of.reads_text(self.store.model, kwargs):
            kwargs = kwargs | {"tokenizer": prompts.tokenizer}
        with self.store.in_use():  # until what was said is saved
            out, said = self._generate(ids, dict(attention_mask=torch.ones_like(ids), **kwargs))
            rows = out if isinstance(out, torch.Tensor) else out.sequences
            # A decoder gives the prompt, too; that of an encoder-decoder has none.
            new = rows[0, 0 if is_of_encoder else ids.shape[1] :]
            if begin:
                answer += prompts.end_of(prompt, new.tolist())
            else:
                answer = str(prompts.tokenizer.decode(new, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answer})
            ends = {**self._ends_in(said, prompts, messages), len(messages): len(said)}
            # When nothing can fail any more: it is as it was, or has the whole turn.
            self._now(ids=said, messages=messages, ends=ends, reuse=self.store.reuse[0])
            self.store.conversations.changed(self, generated=True)
            return answer

    def regenerate(
        self,
        *,
        tokenizer: Any,
        begin: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Another answer to the last message; the arguments are as of `send`.

        Raises:
            ConfigError: there is no answer yet. Otherwise as `generate`; the conversation is as it was.
        """
        self._check_open()
        self._enter(sys._getframe())
        try:
            if len(self.messages) < 2 or role_of(self.messages[-1]) != "assistant":
                raise ConfigError("There is no answer to generate again: `send` a message first.")
            *before, last, _ = self.messages
            prompts = Prompts(tokenizer, tools, chat_template_kwargs)
            return self._send(before, last, prompts, None, begin, kwargs)
        finally:
            self._inside.clear()

    def fork(self, name: str) -> Conversation:
        """Another conversation with the same history, which is kept once.

        Raises:
            ConfigError: there is one by that name, or it is what no conversation can be named.
        """
        self._check_open()
        with self.store.in_use():  # until it is saved
            made = Conversation(self.store, name, self.salt)
            ids, messages, ends = self._said()
            # Messages of its own, too: whoever changes one changes nothing in the other conversation.
            vars(made).update(ids=list(ids), messages=copy.deepcopy(messages), ends=ends)
            # With its history: whoever finds it, and an interrupt, has all or nothing of it.
            self.store.conversations.add(made)
            self.store.conversations.changed(made)
            return made

    def rewind(self, *, tokens: int | None = None, turns: int | None = None) -> None:
        """Forget the end: so many tokens, or, of a chat, so many messages of the user with all that followed. The
        ids of a chat are then those of the last call, as far as what is left of its messages came to.

        Raises:
            ConfigError: neither or both; what is no number; more than there is; or tokens of a chat, whose messages say
                what is sent.
            ConcurrentUseError: a call is generating with this conversation.
        """
        self._check_open()
        if (tokens is None) == (turns is None):
            raise ConfigError("rewind needs tokens= or turns=.")
        self._enter(sys._getframe())
        try:
            with self.store.in_use():  # until that is saved
                if tokens is not None:
                    self._rewind_tokens(tokens)
                elif turns is not None:
                    self._rewind_turns(turns)
                self.store.conversations.changed(self)
        finally:
            self._inside.clear()

    def _rewind_tokens(self, tokens: int) -> None:
        if self.messages:
            raise ConfigError("A chat is rewound by turns=: the next prompt is made of its messages.")
        check_count("tokens", tokens)
        if not 0 <= tokens <= len(self.ids):
            raise ConfigError(f"tokens={tokens}: the conversation has {len(self.ids)}.")
        self.ids = self.ids[: len(self.ids) - tokens]

    def _rewind_turns(self, turns: int) -> None:
        check_count("turns", turns)
        ids, messages, ends = self._said()
        at = [i for i, message in enumerate(messages) if role_of(message) == "user"]
        if not 0 <= turns <= len(at):
            raise ConfigError(f"turns={turns}: the conversation has {len(at)}.")
        if turns:
            messages = messages[: at[-turns]]
            ends = {n: tokens for n, tokens in ends.items() if n <= len(messages)}
            vars(self).update(ids=ids[: ends.get(len(messages), 0)], messages=messages, ends=ends)

    # What it is worth

    @property
    def pinned(self) -> bool:
        """Whether what is kept of its tokens stays, in memory and on the disk, whoever needs the room. It may leave
        the device. What has no room but that is refused: a call with a `BudgetError` that names who is pinned.

        Setting it raises BudgetError where running calls were promised that room; nothing was changed then.
        """
        return self.rank.pinned

    @pinned.setter
    def pinned(self, pinned: bool) -> None:
        self.set_rank(pinned=pinned)

    @property
    def priority(self) -> int:
        """What is kept of its tokens is given up after all of a lower priority. Of others it is 0."""
        return self.rank.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self.set_rank(priority=priority)

    @property
    def ttl(self) -> float:
        """Seconds after the last use from which what is kept of its tokens is given up before all others, where room is
        needed, unless it is pinned. `math.inf`: no limit. The name, the ids and the messages stay."""
        return self.rank.ttl

    @ttl.setter
    def ttl(self, ttl: float) -> None:
        self.set_rank(ttl=ttl)

    def set_rank(self, *, pinned: bool | None = None, priority: int | None = None, ttl: float | None = None) -> None:
        """Set some of `pinned`, `priority` and `ttl`, all or nothing; None stays as it is.

        Raises:
            ConfigError: not a truth value, a whole number, a number of seconds.
            BudgetError: see `pinned`. Nothing was changed.
        """
        self._check_open()
        before = self.rank
        self.rank = rank_of(
            before.pinned if pinned is None else pinned,
            before.priority if priority is None else priority,
            before.ttl if ttl is None else ttl,
        )
        try:
            self.store.conversations.rank(self, before)
        except BaseException:
            self.rank = before
            with contextlib.suppress(
                Exception
            ):  # what was refused has changed nothing; an interrupt may have come later
                self.store.conversations.changed(self)
            raise

    def park(self) -> None:
        """Let its blocks leave the device now: nobody will go on for a while. Nothing is lost."""
        self._check_open()
        self.store.park(self.ids, salt=self.salt)

    def drop(self, start: int, stop: int) -> None:
        """Give up what is kept of these tokens of the history, such as a long document; the next turn computes them
        again, and no others. See `ConversationStore.drop`.

        Raises:
            ConfigError: positions that the history does not have.
        """
        self._check_open()
        self.store.drop(self.ids, start, stop, salt=self.salt)

    def wake(self, *, wait: bool = False, timeout: float | None = None) -> Wake:
        """A turn is known to come (a tool call returns, a user types): bring what is kept nearer in the background; see
        `ConversationStore.wake`.

        Args:
            wait: return when that has ended, not at once. Its `why` says why not all was brought nearer.
            timeout: seconds after which it ends, whatever has come until then.

        Raises:
            ConfigError: a timeout that is not a number of seconds.
        """
        self._check_open()
        wake = self.store.wake(self.ids, salt=self.salt, timeout=timeout)
        if wait and not wake.wait(timeout):
            wake.expire()
        return wake

    def close(self) -> None:
        """Forget the name. What is kept of its tokens stays as long as there is room.

        Raises:
            ClosedError: it is saved, and its store was closed. It is saved still.
        """
        if not self.closed:
            self.store.conversations.remove(self)
            self.closed = True  # last: what is cut short is done again

    def _ends_in(self, said: Sequence[int], prompts: Prompts, messages: Sequence[Message]) -> dict[int, int]:
        """What numbers of messages came to in what was said now. A template may change what came before, and an answer
        may be tokenised otherwise than it was generated: the last one is looked for again, of others what is alike."""
        ids = packed(said)
        alike, last = common(packed(self.ids), ids), max(self.ends, default=0)
        ends = {n: min(tokens, alike) for n, tokens in self.ends.items()}
        if last < len(messages) and self.ends.get(last, 0) > alike:
            with contextlib.suppress(Exception):  # of the tokenizer: the answer is there
                ends[last] = common(packed(prompts.ids_of(messages[:last], answer=False)), ids)
        return ends

    def _check_open(self) -> None:
        if self.closed or self.store.closed:
            raise ClosedError(f"Conversation {self.name!r} was closed. Open it again.")

    def __repr__(self) -> str:
        return f"Conversation({self.name!r}, {len(self.ids)} tokens, {len(self.messages)} messages)"
