"""`Requests`: which requests an engine has, and where each of them is."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from kvtier.conversation.store import ConversationStore
from kvtier.errors import BudgetError, ClosedError, ConfigError, QueueFullError
from kvtier.forks import heed, inherited
from kvtier.hf.engine.sampling import Sampling
from kvtier.memory.access.change import Change, undone
from kvtier.memory.access.lock import held_twice, new_lock
from kvtier.scheduling.job import Job
from kvtier.scheduling.prices import RECOMPUTE, SWAP
from kvtier.scheduling.shares import Shares
from kvtier.serving.costs import Costs
from kvtier.serving.prefixes import Prefixes, try_to_keep
from kvtier.serving.request import Request, RequestOptions, RequestOutput
from kvtier.serving.runners.runner import Runner

_LOG = logging.getLogger("kvtier.serving")

#: Requests that have ended, whose outputs are kept for whoever asks.
MAX_ENDED = 4096


class _Books:
    """Whether a change of where requests are was cut short. The next step repairs it."""

    interrupted = has_garbage = False

    def collect(self) -> None:
        """Nothing: the next step does."""


class _PublishingChange(Change):
    """A change that looks at the model again, and at whose end the numbers of requests are published. What a listener
    adds or cancels is part of the change in the midst of which it is told."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Requests) -> None:
        super().__init__(requests.books)
        self._requests = requests

    def __enter__(self) -> None:
        if not (threading.get_ident() in self._inside and self._within):
            super().__enter__()
        self._requests.begin_change()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._within:
            super().__exit__(kind, error, trace)
        elif error is not None and not undone(error):
            self._requests.books.interrupted = True
        self._requests.publish()

    @property
    def _within(self) -> bool:
        """Whether this thread is in the midst of another change, and no interrupt has ended that: it has the lock."""
        return held_twice(self._requests.re_entrant)


class Requests:
    """The requests of an engine: each waits, runs, or has ended. One that runs has a sequence of the runner.

    Every method but `output` is called under `lock`, within `change`: `with requests.lock, requests.change:`.

    Args:
        runner: whose sequences they are.
        prefixes: what requests begin with, and what keeps what they have computed; None: nothing does.
        store: whose conversations go on with them.
        costs: which know how fast prompts are computed.
        max_waiting: requests that wait, beyond which more are refused.
        clock: seconds.

    Attributes:
        lock: notified when a request has come, has got a token, or has ended.
        re_entrant: what it locks.
        change: marks changes, so that one that an interrupt cuts short is known to be.
        books: whether one was.
        named: those that have not ended, by name.
        waiting, running: these by job. A sample whose prompt is not there yet is in neither.
        ended: outputs of those that have ended, as far as they are kept.
        shares: what tenants were served.
        counts: of those that run and those that wait, samples whose prompt is not there yet among them, as the last
            change left them. Read without the lock, which the thread that runs steps takes again as soon as it gives it
            back.
        closed: no request comes any more.
    """

    def __init__(
        self,
        runner: Runner,
        prefixes: Prefixes | None,
        store: ConversationStore | None,
        costs: Costs,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._prefixes = prefixes
        self._store = store
        self._costs = costs
        self.max_waiting = max_waiting
        self._read_clock = self._clock = clock
        if runner.processes is not None:  # ends come in one process alone, too
            self._read_clock, self._clock = runner.processes.clock(clock), runner.processes.last
            self._read_clock()
        self._numbers = itertools.count()
        self.re_entrant = new_lock()
        self.lock = threading.Condition(cast(Any, self.re_entrant))
        self.books = _Books()
        self.change = _PublishingChange(self)
        self.named: dict[str, Request] = {}
        self.waiting: dict[Job, Request] = {}
        self.running: dict[Job, Request] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.shares = Shares()
        self.counts = (0, 0)
        self.closed = False
        heed(self)

    def forked(self) -> None:
        """As of `Inherited`: a thread that is not here may be at a change."""
        before, self.re_entrant = self.re_entrant, inherited(self.re_entrant, new_lock)
        self.lock = threading.Condition(cast(Any, self.re_entrant))
        if self.change.forked() or self.re_entrant is not before:
            self.books.interrupted = True
        for request in self.named.values():
            request.listener = None  # the parent tells

    def begin_change(self) -> None:
        """A change begins: the model may be another one than in the last change."""
        if self._prefixes is not None:
            self._prefixes.seen = None

    def publish(self) -> None:
        """A change is over: whoever asks how many requests there are hears of it."""
        self.counts = len(self.running), len(self.named) - len(self.running)

    def check_open(self) -> None:
        """Raise `ClosedError` where no request may come any more."""
        if self.closed:
            raise ClosedError("This Engine was closed. Make a new one.")

    def output(self, name: str) -> RequestOutput | None:
        """What there is of a request; None: there is none, or it has ended long ago."""
        with self.lock:
            request = self.named.get(name)
            return self.ended.get(name) if request is None else request.output

    # Coming

    def has_room(self, count: int) -> bool:
        """Whether so many sequences of a prompt may be added: all of them may come to wait."""
        return len(self.waiting) + count <= self.max_waiting

    def add(self, prompt: Sequence[int], samplings: Sequence[Sampling], terms: RequestOptions) -> list[Request]:
        """A request for each sequence of a prompt. The first one waits from now on, the others until it has its prompt.

        Args:
            samplings: what each asks.

        Raises:
            BudgetError: it could never fit the budgets. QueueFullError: too many wait.
            ConfigError: a name is in use, or the conversation is of another salt.
        """
        self._check_fits(prompt, samplings[0].max_length)
        now, chat = self._read_clock(), None
        active = {each.job.tenant for each in self.named.values()}
        if terms.tenant not in active:
            self.shares.arrives(terms.tenant, active)
        if not self.has_room(len(samplings)):
            raise QueueFullError(
                f"{len(self.waiting)} requests wait, and max_waiting is {self.max_waiting}: wait for one to end, or "
                "make the engine with a larger max_waiting."
            )
        number = next(self._numbers)
        while terms.request_id is None and self.output(f"request-{number}") is not None:
            number = next(self._numbers)  # a user's own name
        name = f"request-{number}" if terms.request_id is None else str(terms.request_id)
        names = [name, *(f"{name}#{i}" for i in range(1, len(samplings)))]
        for each in names:
            if each in self.named:
                raise ConfigError(f"A request named {each!r} has not ended yet.")
        if terms.conversation is not None and self._store is not None:  # last: what is refused makes no conversation
            chat = self._store.turn_of(terms.conversation, terms.salt)
        made = []
        for i, (each, own) in enumerate(zip(names, samplings, strict=True)):
            output = RequestOutput(each, list(prompt), arrived=now)
            output.logprobs = [] if terms.logprobs or terms.top_logprobs else None
            output.top_logprobs = [] if terms.top_logprobs else None
            number = number if not i else next(self._numbers)
            job = Job(number, now, len(prompt), own.max_length, priority=terms.priority, tenant=terms.tenant)
            made.append(Request(output, own, job, terms))
            made[-1].chat = None if i else chat
            own.start()
        made[0].samples = made[1:]
        self.wait(made[0])  # first: what fails is not added
        for request in made:
            self.ended.pop(request.name, None)
            self.named[request.name] = request
        self.lock.notify_all()
        return made

    def _check_fits(self, prompt: Sequence[int], length: int) -> None:
        """Refuse what could never run, even alone."""
        try:
            self._runner.check_fits(length - 1)  # the last token is never attended to
        except BudgetError as error:
            raise BudgetError(
                f"A prompt of {len(prompt)} tokens that may grow to {length} does not fit. {error}",
                tier=error.tier,
                needed=error.needed,
                budget=error.budget,
            ) from None

    def wait(self, request: Request) -> None:
        """A request waits from now on."""
        if self._prefixes is not None:
            self._prefixes.comes(request, self._clock() + request.job.tokens / self._costs.rate)
        self.waiting[request.job] = request

    # Running

    def hold_back(self, jobs: Iterable[Job]) -> bool:
        """Of jobs that have a part in a step, in this order, let those that are about to run wait whose beginning
        another one of them computes. Whether there are any."""
        if self._prefixes is None:
            return False
        jobs = list(jobs)
        return self._prefixes.hold_back([self.waiting[job] for job in jobs if job in self.waiting], set(jobs))

    def admit(self, job: Job) -> Request:
        """The request of a job that runs from now on, if it did not before."""
        request = self.running.get(job)
        if request is None:
            request = self.running[job] = self.waiting.pop(job)
            cached = 0 if self._prefixes is None else self._prefixes.begin(request)
            if not cached:
                request.sequence = self._runner.add()
            if request.output.first_token is None or not request.begun:
                # What it finds when it begins again may be its own work.
                most = request.output.cached_tokens if request.begun else len(request.output.prompt_ids)
                request.output.cached_tokens = min(cached, most)
            if request.output.scheduled is None:
                request.output.scheduled = self._clock()
            request.begun = True
            job.running, job.cached, job.reusable, job.swapped = True, cached, 0, 0
        return request

    def preempt(self, job: Job, way: str = RECOMPUTE) -> None:
        """A job gives up its blocks, and waits; they stay on the host, or as long as nobody needs the room."""
        request = self.running.pop(job)
        self._give_up(request)
        request.output.preempted += 1
        if way == SWAP and self._prefixes is not None and self._prefixes.swap(request):
            request.output.swapped += 1
        job.running, job.cached, job.blocks = False, 0, 0
        self.wait(request)

    def computed(self, request: Request) -> None:
        """A part of its prompt is there, for others to begin with."""
        if self._prefixes is not None:
            try_to_keep(self._prefixes.computed, request)

    def fork(self, request: Request, most: int) -> None:
        """The other samples of a prompt that is there now go on with its blocks, or wait where they cannot.

        Args:
            most: that run at a time.
        """
        for sample in request.samples:
            if sample.done.is_set():
                continue
            sample.output.scheduled = request.output.scheduled  # its first token is of the prompt's last step
            try:
                sequence = self._runner.fork(request.sequence) if len(self.running) < most else None
            except AssertionError:
                raise  # of no request: what is counted does not agree
            except Exception as error:
                self.end(sample, "error", error)
                continue
            if sequence is None:
                self.wait(sample)
                continue
            sample.sequence, sample.epoch = sequence, request.epoch
            sample.key, sample.changes = request.key, request.changes
            sample.job.running, sample.job.cached = True, request.job.cached
            sample.output.cached_tokens = len(sample.output.prompt_ids)
            sample.begun = True
            self.running[sample.job] = sample
        request.samples = []

    def _give_up(self, request: Request, *, keep: bool = True) -> None:
        """A request gives up its sequence; what it has computed is kept, as long as nobody needs the room."""
        if self._prefixes is not None:
            if keep:
                try_to_keep(self._prefixes.keep, request)
            self._prefixes.there(request)
        if request.sequence is not None:
            self._runner.remove(request.sequence)
            request.sequence = None

    # The end

    def end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """A request ends. Nothing, if it has ended."""
        if self.named.get(request.name) is not request:
            return
        samples, request.samples = request.samples, []
        self.running.pop(request.job, None)
        self.waiting.pop(request.job, None)
        if reason in ("stop", "length"):
            self._go_on(request)
        self._give_up(request, keep=reason != "error")
        request.end(reason, self._clock(), error)
        self._has_ended(request)
        while len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        for sample in samples:  # nobody computes their prompt any more
            if reason == "error":
                self.end(sample, reason, error)
            elif not sample.done.is_set():
                self.wait(sample)
        self.lock.notify_all()

    def _go_on(self, request: Request) -> None:
        """The turn of a conversation is its history from now on, and has its rank: before the sequence is given up,
        whose room was promised."""
        if request.chat is None:
            return
        try:
            request.chat.went_on(request.ids)
        except ClosedError as error:  # its name was forgotten meanwhile, and may be another's by now
            request.output.conversation_error = error
        except AssertionError:
            raise  # of no request: what is counted does not agree
        except Exception as error:
            request.output.conversation_error = error
            _LOG.exception("The conversation of request %r is not saved, or not ranked, as it is now.", request.name)

    def cancel_all(self) -> None:
        """Every request ends, before the runner is closed. Where things are half done nothing is kept."""
        if self.books.interrupted:
            self._take_sequences()
        for request in self.named.values():
            request.samples = []  # nobody begins any more
        for request in list(self.named.values()):
            self.end(request, "cancelled")

    def give_up_all(self, error: BaseException) -> None:
        """Every request ends as it is, in whatever state an interrupt has left it: a next step repairs the rest.
        Listeners are told last, and each of them whatever another one raises."""
        ended = list(self.named.values())
        for request in ended:
            request.samples = []
            request.end("error", self._clock(), error)
            self._is_not_listed(request)
        self.running.clear()
        self.waiting.clear()
        self.publish()
        self.lock.notify_all()
        for request in ended:
            try:
                request.tell()
            except BaseException:
                _LOG.exception("A listener of request %r raised.", request.name)

    def ends(self, request: Request) -> str | None:
        """Why a request ends with the tokens that it has; "": it goes on; None: one of its criteria has failed, and it
        with that."""
        try:
            return request.sampling.ends(request.ids)
        except Exception as error:
            self.end(request, "error", error)
            return None

    def end_cancelled(self) -> None:
        """Those end that were cancelled."""
        for request in [each for each in self.named.values() if each.cancelled]:
            self.end(request, "cancelled")

    def _has_ended(self, request: Request) -> None:
        """It is not listed any more, and its user hears of it."""
        self._is_not_listed(request)
        request.tell()

    def _is_not_listed(self, request: Request) -> None:
        if request.listener is None:
            self.ended[request.name] = request.output
        del self.named[request.name]

    def recover(self) -> None:
        """After an interrupt, which may have come between any two lines: every request that has not ended begins again
        with the tokens that it has. Nothing, if there was none."""
        if not self.books.interrupted:
            return
        self._runner.reset()
        self._take_sequences()
        later = {sample.name for request in self.named.values() for sample in request.samples}
        for request in list(self.named.values()):
            if request.done.is_set():
                self._has_ended(request)
                continue
            reason = self.ends(request) if request.output.generated_tokens else ""
            if reason:
                self.end(request, reason)
            elif reason is not None and request.name not in later:
                self.wait(request)
        self.books.interrupted = False

    def _take_sequences(self) -> None:
        """No request has a sequence, nor anything that is kept; each has the tokens that it has."""
        if self._prefixes is not None:
            self._prefixes.reset()
        self.running.clear()
        self.waiting.clear()
        for request in self.named.values():
            request.again()

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging, between two steps."""
        assert not self.waiting.keys() & self.running.keys(), "a job waits and runs"
        for job, request in self.running.items():
            assert job.running
            assert request.sequence is not None, "a job runs without a sequence"
            assert job.cached == self._runner.cached(request.sequence), "cached tokens are counted wrong"
            assert job.tokens == len(request.ids)
        for job, request in self.waiting.items():
            assert not job.running
            assert request.sequence is None, "a job waits and holds blocks"
