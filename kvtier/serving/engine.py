"""`Engine`: many requests on one tiered memory, batched anew at each step."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from kvtier.config import CacheOptions, Size
from kvtier.conversation.store import ConversationStore
from kvtier.errors import BudgetError, ClosedError, ConcurrentUseError, ConfigError, QueueFullError, UnsupportedError
from kvtier.hf import generation as of
from kvtier.hf.sampling import Sampling, choose, log_probabilities
from kvtier.memory import measured
from kvtier.memory.change import Change
from kvtier.memory.tiered import TieredMemory
from kvtier.scheduling.job import Job, Load, Ways
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.prices import RECOMPUTE, SWAP, Always
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.shares import Shares
from kvtier.serving.choice import choose_runner
from kvtier.serving.costs import Costs
from kvtier.serving.prefixes import prefixes_of
from kvtier.serving.request import EngineLoad, Listener, Request, RequestOutput, prompt_of
from kvtier.serving.runner import PackedRunner, Work
from kvtier.serving.sub_batches import why_not as why_no_turns

_LOG = logging.getLogger("kvtier.serving")

#: Requests that wait, beyond which more are refused.
MAX_WAITING = 4096
PREEMPTION = ("price", SWAP, RECOMPUTE)
#: Requests that have ended, whose outputs are kept for whoever asks.
MAX_ENDED = 4096
#: Tokens of a step from which on its time says how fast prompts are computed; and the weight of what was known.
_TELLING, _KEEPS = 16, 0.8
#: Seconds until it is looked again whether what a request waits for was loaded.
_PAUSE = 0.001
#: Times that failures may cost a request what it had computed.
_MOST_LOST = 2


class _Books:
    """Which requests there are, and where: whether a change of that was cut short. A step repairs it."""

    interrupted = has_garbage = False

    def collect(self) -> None:
        """Nothing: the next step does."""


class Engine:
    """Generates for many requests at a time with one model.

        with kvtier.Engine(model, host_budget="64GiB") as engine:
            name = engine.add_request(ids, max_new_tokens=64)
            for token in engine.stream(name):
                ...

        outputs = kvtier.Engine(model).generate_batch(list_of_ids, max_new_tokens=64)

    At each step the scheduler says which tokens of which requests are computed: the next one of each that has its
    prompt, and parts of prompts. A request's greedy tokens are those of `model.generate`, whatever else is in the
    batch, to rounding. The model is not changed but for its attention implementation, which `close` puts back.

    Args:
        model: of Transformers, a decoder.
        tokenizer: for stop strings.
        store: a `ConversationStore` of the model, whose memory, block size and host attention are then the engine's:
            requests begin with what its calls, and requests before, have left, and leave what they compute to it. None:
            the engine keeps that itself, until it is closed.
        device_budget, host_budget: as of `TieredMemory`.
        memory: a `TieredMemory` that others use too; budgets are then its own.
        block_size, host_attention: as of `TieredKVCache`; the default block is 64 tokens, for many short requests.
        max_batch_tokens: computed in one step, at the most.
        max_running: requests that run at a time.
        max_waiting: requests that wait, beyond which `add_request` refuses.
        scheduler: "fair" (highest response ratio next), "fcfs" (first come, first served), or a `kvtier.Scheduler`.
        runner: "packed" (one forward for all), "ragged" (the same for models with recurrent states), "single" (a
            forward for each), or "auto": the first that gives the model's own scores in a trial of a few tokens.
        spill: whether what runs may outgrow the device budget: its blocks are then on the host, too, attended to there
            or fetched for each step. False: what runs is on the device, and what outgrows that is preempted.
        preemption: how a request comes back that had to give up its blocks: "swap", its blocks wait on the host (where
            `spill` leaves that free); "recompute", they are kept as long as nobody needs the room, and the rest is
            computed again; "price", whichever takes less time, by what steps and copies took so far.
        clock: seconds.

    Raises:
        ConfigError: an option that is malformed.
        UnsupportedError: an encoder-decoder; or `runner="packed"`, and the model cannot be packed; or no way of running
            it gives its own scores.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        store: ConversationStore | None = None,
        device_budget: Size | Mapping[str, Size] | None = None,
        host_budget: Size | None = None,
        memory: TieredMemory | None = None,
        block_size: int | Literal["auto"] = 64,
        host_attention: bool = True,
        max_batch_tokens: int = 2048,
        max_running: int = 256,
        max_waiting: int = MAX_WAITING,
        scheduler: Scheduler | str = "fair",
        runner: str = "auto",
        sub_batches: bool | Literal["auto"] = "auto",
        spill: bool = True,
        preemption: str = "price",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = CacheOptions.parse(block_size, host_attention) if store is None else store.options
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_running", max_running),
            ("max_waiting", max_waiting),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a number, at least 1.")
        if not isinstance(sub_batches, bool) and sub_batches != "auto":
            raise ConfigError(f"sub_batches={sub_batches!r}: give True, False or 'auto'.")
        if store is not None:
            if memory is not None and memory is not store.memory:
                raise ConfigError("store= brings its own memory: leave out memory=.")
            memory = store.memory
        if memory is not None and (device_budget is not None or host_budget is not None):
            raise ConfigError("memory= and store= bring their own budgets: leave out device_budget and host_budget.")
        if getattr(of.inner(model).config, "is_encoder_decoder", False):
            raise UnsupportedError("An encoder-decoder has a prompt of its own for each forward: use `generate`.")
        if preemption not in PREEMPTION:
            raise ConfigError(f"preemption={preemption!r}: give one of {', '.join(map(repr, PREEMPTION))}.")
        self._scheduler = scheduler_of(scheduler)
        self._model = model
        self._tokenizer = tokenizer
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._own_memory = memory is None
        if memory is None:
            memory = TieredMemory(
                device_budget=device_budget, host_budget="auto" if host_budget is None else host_budget
            )
        self.memory = memory
        try:
            self._runner, self._enabled = choose_runner(model, memory, options, runner)
            self._allow(sub_batches)
            self._prefixes = prefixes_of(model, self._runner, store)
        except BaseException:
            if self._own_memory:
                memory.close()
            raise
        self._store = store
        self._lock = threading.Condition()
        self._stepping = threading.RLock()
        self._shares = Shares()
        self._books = _Books()
        self._change = Change(self._books)
        self._numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._waiting: dict[Job, Request] = {}
        self._running: dict[Job, Request] = {}
        self._ended: dict[str, RequestOutput] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._rate = 1000.0
        self._spill = bool(spill)
        self._costs = Costs(max_batch_tokens, measured.hardware(torch.device(model.device)).rates())
        self._ways: Ways = self._costs if preemption == "price" else Always(preemption)
        self.steps = 0

    def _allow(self, sub_batches: object) -> None:
        """Let forwards take turns, or say why they do not."""
        runner = self._runner
        if not sub_batches:
            return
        if not isinstance(runner, PackedRunner):
            reason = f"the model is run {runner.name}"
        else:
            reason = why_no_turns(self._model, self.memory, runner.forward.options.host_attention)
        if not reason and sub_batches == "auto" and any(device.kind != "cpu" for device in self.memory.devices):
            reason = "no accelerator was there to test that on yet; sub_batches=True asks for it"
        if reason and sub_batches is True:
            runner.close()
            if self._enabled is not None:
                self._enabled.disable()
            raise UnsupportedError(f"sub_batches=True: {reason}.")
        if reason:
            _LOG.info("Forwards do not take turns: %s.", reason)
        elif isinstance(runner, PackedRunner):
            runner.allow_sub_batches()

    @property
    def sub_batches(self) -> bool:
        """Whether a step may be computed by two forwards that take turns."""
        return isinstance(self._runner, PackedRunner) and self._runner.sub_batches is not None

    @property
    def runner(self) -> str:
        """How the model is run: "packed" (one forward for all), "ragged" (those that decode together, their recurrent
        states stacked), "single" (a forward and a cache for each), "uncached" (no cache of ours serves the model: each
        step computes all tokens of a sequence)."""
        return self._runner.name

    @property
    def model(self) -> Any:
        """Of Transformers."""
        return self._model

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """What there is to do now, and how much of the memory that takes."""
        total, _, _ = self._runner.blocks()
        with self._lock:
            held = sum(job.blocks for job in self._running)
            return EngineLoad(len(self._running), len(self._waiting), held, total, self._rate, self.steps, self.alive)

    # Requests

    def add_request(
        self,
        ids: Any,
        generation_config: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        seed: int | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        salt: Hashable = None,
        conversation: str | None = None,
        tenant: str = "",
        listener: Listener | None = None,
        **options: Any,
    ) -> str:
        """Add a request to the queue.

        Args:
            ids: the prompt, token ids: a list, a tensor, `[tokens]` or `[1, tokens]`.
            generation_config: as of `generate`; None: the model's.
            request_id: a name that no request has which has not ended; None: a new one.
            priority: requests with a higher one go first.
            seed: of the request's own random numbers.
            logprobs: whether the log-probability of each token is kept.
            top_logprobs: how many of the likeliest tokens are kept at each place, with their log-probabilities.
            salt: what is kept of a request is found by those with an equal salt only, so that tenants share nothing.
            conversation: of the store, whose history prompt and answer become when the request has ended.
            tenant: whose it is: under the fair scheduler, the tenant that was served least goes next.
            listener: called with the output of each of the request's sequences whenever it has a new token, and when it
                has ended. In the thread that runs the steps, under the engine's lock: it must not block. The engine
                keeps no output of a request with a listener that has ended.
            options: settings of `generate`, `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`. With
                `num_return_sequences` there are more sequences of the prompt, named `NAME#1`, `NAME#2` and so on, which
                share its blocks.

        Returns:
            The name.

        Raises:
            BudgetError: it could never fit the budgets. QueueFullError: too many wait.
            ConfigError: no tokens, a name in use, an option that `generate` does not know.
            UnsupportedError: beams, and other ways to decode that are not token by token.
        """
        first, *_ = self._add(
            ids,
            generation_config,
            request_id=request_id,
            priority=priority,
            seed=seed,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            salt=salt,
            conversation=conversation,
            tenant=tenant,
            listener=listener,
            **options,
        )
        return first.name

    def _add(
        self,
        ids: Any,
        generation_config: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        seed: int | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        salt: Hashable = None,
        conversation: str | None = None,
        tenant: str = "",
        listener: Listener | None = None,
        **options: Any,
    ) -> list[Request]:
        """The same; a request for each sequence of the prompt."""
        prompt = prompt_of(ids)
        if not prompt:
            raise ConfigError("A request needs at least one token.")
        if conversation is not None:
            if self._store is None:
                raise ConfigError("conversation= needs an engine with a store.")
            self._store.open(conversation, salt=salt)
        sampling = Sampling(self._model, prompt, generation_config, tokenizer=self._tokenizer, seed=seed, **options)
        if sampling.max_length <= len(prompt):
            raise ConfigError(
                f"The prompt has {len(prompt)} tokens, and max_length={sampling.max_length} leaves none to generate."
            )
        now = self._clock()
        with self._lock, self._change:
            self._check_open()
            self._check_fits(prompt, sampling)
            active = {each.job.tenant for each in self._requests.values()}
            if tenant not in active:
                self._shares.arrives(tenant, active)
            if len(self._waiting) + sampling.count > self._max_waiting:
                raise QueueFullError(f"{len(self._waiting)} requests wait, and max_waiting is {self._max_waiting}.")
            number = next(self._numbers)
            name = f"request-{number}" if request_id is None else str(request_id)
            names = [name, *(f"{name}#{i}" for i in range(1, sampling.count))]
            for each in names:
                if each in self._requests:
                    raise ConfigError(f"A request named {each!r} has not ended yet.")
            made = []
            for i, each in enumerate(names):
                self._ended.pop(each, None)
                output = RequestOutput(each, list(prompt), arrived=now)
                output.logprobs = [] if logprobs or top_logprobs else None
                output.top_logprobs = [] if top_logprobs else None
                own = sampling if not i else sampling.again(i)
                number = number if not i else next(self._numbers)
                job = Job(number, now, len(prompt), own.max_length, priority=priority, tenant=tenant)
                made.append(Request(output, own, job, salt=salt, conversation=None if i else conversation))
                made[-1].listener, made[-1].top_logprobs = listener, top_logprobs
                self._requests[each] = made[-1]
            made[0].samples = made[1:]
            self._wait(made[0])
            self._lock.notify_all()
        return made

    def _wait(self, request: Request) -> None:
        """A request waits. Holds the lock."""
        self._waiting[request.job] = request
        if self._prefixes is not None:
            self._prefixes.comes(request, self._clock() + request.job.tokens / self._rate)

    def _check_fits(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse what could never run, even alone."""
        try:
            self._runner.check_fits(sampling.max_length - 1)  # the last token is never attended to
        except BudgetError as error:
            raise BudgetError(
                f"A prompt of {len(prompt)} tokens that may grow to {sampling.max_length} does not fit. {error}",
                tier=error.tier,
                needed=error.needed,
                budget=error.budget,
            ) from None

    def cancel(self, request_id: str) -> None:
        """Let a request end at the next step; its output says "cancelled". Nothing, if it has ended."""
        with self._lock, self._change:
            request = self._requests.get(request_id)
            if request is not None:
                request.cancelled = True
                self._lock.notify_all()

    def stream(self, request_id: str, timeout: float | None = None) -> Iterator[int]:
        """The tokens of a request as they come; call `output` for how it ended. Each token is given once.

        Args:
            timeout: seconds to wait for a token.

        Raises:
            ConfigError: no such request. TimeoutError: no token came for so long. What the request failed with.
        """
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            output = self.output(request_id)
            yield from output.generated_tokens
        else:
            yield from self._tokens_of(request, timeout)
            output = request.output
        if output.error is not None:
            raise output.error

    def _tokens_of(self, request: Request, timeout: float | None) -> Iterator[int]:
        given = 0
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                new = request.output.generated_tokens[given:]
                over = request.done.is_set()
                if not new and not over and self._thread is not None:
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"No token of {request.name!r} came in time.")
                    self._lock.wait(left)
                    continue
            if new:
                until = None if timeout is None else time.monotonic() + timeout
            yield from new
            given += len(new)
            if over:
                return
            if not new:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"No token of {request.name!r} came in time.")
                self.step()

    def output(self, request_id: str) -> RequestOutput:
        """What there is of a request; of those that have ended, the last 4096 are kept. Raises `ConfigError`."""
        with self._lock:
            request = self._requests.get(request_id)
            found = self._ended.get(request_id) if request is None else request.output
        if found is None:
            raise ConfigError(f"There is no request {request_id!r}.")
        return found

    def wait(self, request_id: str, timeout: float | None = None) -> RequestOutput:
        """The output of a request when it has ended. Raises `ConfigError`, TimeoutError."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            return self.output(request_id)
        for _ in self._tokens_of(request, timeout):
            pass
        return request.output

    def generate_batch(
        self, inputs: Sequence[Any], generation_config: Any = None, **options: Any
    ) -> dict[str, RequestOutput]:
        """Generate for all of these prompts.

        Args:
            inputs: token ids of each.
            generation_config, options: as of `add_request`, for all of them.

        Returns:
            The outputs by name, in the order of `inputs`. Those that failed have an `error`.
        """
        found: dict[str, RequestOutput] = {}
        added: list[Request] = []
        pending = list(enumerate(inputs))
        while pending or not all(each.done.is_set() for each in added):
            while pending:
                i, ids = pending[0]
                try:
                    made = self._add(ids, generation_config, **options)
                except QueueFullError:
                    break
                except (BudgetError, ConfigError) as error:
                    name = f"refused-{i}"
                    output = RequestOutput(name, prompt_of(ids), finish_reason="error", error=error)
                    found[name] = output
                else:
                    added += made
                    found |= {each.name: each.output for each in made}
                pending.pop(0)
            if self._thread is None:
                self.step()
            else:
                waited = next((each for each in added if not each.done.is_set()), None)
                if waited is not None:
                    waited.done.wait(1.0)
        failed = [x for x in found.values() if x.error is not None]
        if failed:
            _LOG.warning("%d of %d requests failed, the first with: %s", len(failed), len(found), failed[0].error)
        return found

    # The loop

    def step(self) -> bool:
        """Compute one step. Whether there was anything to do.

        Raises:
            ConcurrentUseError: another thread is at a step.
        """
        if not self._stepping.acquire(blocking=False):
            raise ConcurrentUseError("Another thread runs this engine's steps.")
        try:
            return self._step()
        except Exception:
            raise
        except BaseException:
            self._books.interrupted = True
            self.memory.cut_short()
            raise
        finally:
            self._stepping.release()

    def _step(self) -> bool:
        with self._lock, self._change:
            self._check_open()
            if self._books.interrupted:
                self._recover()
            self._end_cancelled()
            if not self._running and not self._waiting:
                return False
            plan = self._scheduler.plan(self._load_now())
            for job in plan.preempt:
                self._preempt(job, plan.ways.get(job, RECOMPUTE))
            work: list[tuple[Request, Work]] = []
            for job, tokens in plan.tokens.items():
                request = self._admit(job)
                work.append((request, self._work(request, tokens)))
            if not work and not plan.preempt:
                # What somebody waits for is on its way from the disk.
                self._lock.wait(_PAUSE)
        if not work:
            return True
        self.steps += 1
        began = self._clock()
        for group in self._runner.forwards([each for _, each in work]):
            # Who was preempted for the sake of a part before has no part any more.
            part = [work[i] for i in group if work[i][0].sequence is work[i][1].sequence]
            if part:
                self._run(part)
        took, tokens = self._clock() - began, sum(each.tokens for _, each in work)
        self._runner.took(took)
        self._costs.observe(tokens, sum(each.tokens * (each.cached + each.tokens) for _, each in work), took)
        if tokens >= _TELLING and took > 0:
            self._rate = _KEEPS * self._rate + (1 - _KEEPS) * tokens / took
        return True

    def _load_now(self) -> Load:
        """What the scheduler decides on. Holds the lock."""
        total, used, size = self._runner.blocks()
        for job, request in self._running.items():
            job.blocks = self._runner.held(request.sequence)
        on_host, nbytes, overlaps = (0, 0, False) if self._spill else self._runner.tiers()
        if on_host:
            self._costs.machine(nbytes // size, overlaps)
        now = self._clock()
        return Load(
            now,
            list(self._running),
            [job for job, request in self._waiting.items() if not self._waits_for_another(request, now)],
            total - used - on_host,
            size,
            self._max_batch_tokens,
            self._max_running,
            self._runner.chunked,
            self._rate,
            on_host - sum(-(-job.swapped // size) for job in self._waiting) if on_host else 0,
            self._ways,
            self._shares.served,
        )

    def _recover(self) -> None:
        """After an interrupt, which may have come between any two lines: every request that has not ended begins again
        with the tokens that it has. Holds the lock."""
        self._runner.reset()
        if self._prefixes is not None:
            self._prefixes.reset(self._requests.values())
        self._running.clear()
        self._waiting.clear()
        later = {sample.name for request in self._requests.values() for sample in request.samples}
        for request in list(self._requests.values()):
            request.again()
            if request.done.is_set():
                del self._requests[request.name]
                if request.listener is None:
                    self._ended[request.name] = request.output
                request.tell()
            elif request.output.generated_tokens and (reason := request.sampling.ends(request.ids)):
                self._end(request, reason)
            elif request.name not in later:
                self._wait(request)
        self._books.interrupted = False

    def _waits_for_another(self, request: Request, now: float) -> bool:
        return self._prefixes is not None and self._prefixes.waits(request, now)

    def _work(self, request: Request, tokens: int) -> Work:
        job = request.job
        tokens = min(tokens, job.left) if self._runner.chunked else job.left
        return Work(request.sequence, request.ids, job.cached, tokens, job.cached + tokens == job.tokens)

    def _admit(self, job: Job) -> Request:
        """The request of a job that is to run from now on. Holds the lock."""
        request = self._running.get(job)
        if request is None:
            request = self._running[job] = self._waiting.pop(job)
            cached = 0 if self._prefixes is None else self._prefixes.begin(request)
            if not cached:
                request.sequence = self._runner.add()
            if request.output.first_token is None:
                request.output.cached_tokens = min(cached, len(request.output.prompt_ids))
            job.running, job.cached, job.reusable, job.swapped = True, cached, 0, 0
        return request

    def _preempt(self, job: Job, way: str = RECOMPUTE) -> None:
        """A job gives up its blocks, and waits; they stay on the host, or as long as nobody needs the room. Holds the
        lock."""
        request = self._running.pop(job)
        self._give_up(request)
        request.output.preempted += 1
        if way == SWAP and self._prefixes is not None and self._prefixes.swap(request):
            request.output.swapped += 1
        job.running, job.cached, job.blocks = False, 0, 0
        self._wait(request)

    def _give_up(self, request: Request, *, keep: bool = True) -> None:
        """A request gives up its sequence; what it has computed is kept, as long as nobody needs the room."""
        if self._prefixes is not None:
            if keep:
                self._prefixes.keep(request)
            self._prefixes.there(request)
        if request.sequence is not None:
            self._runner.remove(request.sequence)
            request.sequence = None

    def _run(self, work: list[tuple[Request, Work]]) -> None:
        """Compute a part of a step. A request that fails takes no other with it."""
        while work:
            try:
                scores = self._runner.step([each for _, each in work])
            except BudgetError as error:
                work = self._with_less(work, error)
            except Exception as error:
                alone, work = len(work) == 1, self._follow(work, error)
                if alone and work:
                    self._fail(work[0][0], error)
                    return
                if work:
                    _LOG.warning("A step of %d requests failed, and each is tried alone: %s", len(work), error)
                for each in work:
                    self._run([each])
                return
            else:
                self._deliver(work, scores)
                return

    def _with_less(self, work: list[tuple[Request, Work]], error: BudgetError) -> list[tuple[Request, Work]]:
        """What is left of a part of a step for which there was no room: less of it, or fewer others."""
        first = work[0][0]
        work = self._follow(work, error, counts=not self._others(first))
        if not work:
            self._preempt_last(self._others(first))
            return []
        prompts = [i for i, (_, each) in enumerate(work) if each.tokens > 1]
        if prompts and len(work) > 1:
            return [each for i, each in enumerate(work) if i != prompts[-1]]
        last = self._preempt_last(self._others(work[0][0]))
        if last is not None:
            return [(r, w) for r, w in work if r.job is not last]
        ((request, each),) = work
        if self._runner.chunked and each.tokens > 1:
            return [(request, self._work(request, each.tokens // 2))]
        if self._prefixes is not None and not request.alone:
            # What is kept of it, and a copy of its last block, take room that it needs.
            request.alone = True
            with self._lock, self._change:
                self._preempt(request.job)
            return []
        self._fail(request, error)
        return []

    def _others(self, request: Request) -> list[Job]:
        """Jobs that run besides a request's."""
        return [job for job in self._running if job is not request.job]

    def _preempt_last(self, jobs: list[Job]) -> Job | None:
        """Preempt the last of some jobs; None: there is none."""
        if not jobs:
            return None
        last = max(jobs, key=lambda job: (-job.priority, job.number))
        with self._lock, self._change:
            self._preempt(last)
        return last

    def _follow(
        self, work: list[tuple[Request, Work]], error: Exception, *, counts: bool = True
    ) -> list[tuple[Request, Work]]:
        """After a failure: what of a part can be tried again as it is. A sequence that the failure has cost what was
        computed (recurrent states do not go back) begins again with the next step; for the third time, it has failed.
        """
        same = []
        for request, each in work:
            request.job.cached = self._runner.cached(each.sequence)
            if request.job.cached == each.cached:
                same.append((request, each))
                continue
            request.lost += counts
            if request.lost > _MOST_LOST:
                self._fail(request, error)
        return same

    def _deliver(self, work: list[tuple[Request, Work]], scores: Sequence[Any]) -> None:
        """Give each sequence that has its prompt a new token."""
        now = self._clock()
        with self._lock, self._change:
            asking: list[tuple[Request, Any]] = []
            for (request, each), row in zip(work, scores, strict=True):
                request.job.cached += each.tokens
                self._shares.serve(request.job.tenant, each.tokens, int(row is not None))
                request.job.last_ran = now
                if row is not None and request.output.first_token is None and self._prefixes is not None:
                    self._prefixes.keep(request)
                    self._prefixes.there(request)
                if row is not None and not request.cancelled:
                    asking.append((request, row))
                    asking += [(sample, row) for sample in self._fork(request)]
        if not asking:
            return
        try:
            rows = torch.stack([row for _, row in asking])
            tokens = choose(rows, [x.sampling for x, _ in asking], [x.ids for x, _ in asking])
        except Exception:
            self._deliver_alone(asking, now)
            return
        logs = log_probabilities(rows) if any(x.output.logprobs is not None for x, _ in asking) else None
        with self._lock, self._change:
            for i, ((request, _), token) in enumerate(zip(asking, tokens, strict=True)):
                self._give(request, token, None if logs is None else logs[i], now)
            self._lock.notify_all()

    def _deliver_alone(self, asking: list[tuple[Request, Any]], now: float) -> None:
        """The same, where some request's own processors raise."""
        for request, row in asking:
            try:
                (token,) = choose(row[None], [request.sampling], [request.ids])
                logs = log_probabilities(row[None])[0] if request.output.logprobs is not None else None
            except Exception as error:
                self._fail(request, error)
                continue
            with self._lock, self._change:
                self._give(request, token, logs, now)
                self._lock.notify_all()

    def _give(self, request: Request, token: int, logs: torch.Tensor | None, now: float) -> None:
        """A new token of a request, and the log-probabilities `[vocabulary]` at its place. Holds the lock."""
        if request.done.is_set():
            return
        if request.output.first_token is None:
            request.output.first_token = now
        request.give(token)
        request.job.tokens += 1
        if logs is not None:
            request.give_logs(token, logs)
        try:
            reason = request.sampling.ends(request.ids)
        except Exception as error:
            self._end(request, "error", error)
            return
        if reason:
            self._end(request, reason)
        else:
            request.tell()

    def _fork(self, request: Request) -> list[Request]:
        """The other samples of a prompt that is there now: those that go on with its blocks. Holds the lock."""
        forked = []
        for sample in request.samples:
            if sample.done.is_set():
                continue
            sequence = self._runner.fork(request.sequence)
            if sequence is None:
                self._wait(sample)
                continue
            sample.sequence = sequence
            sample.job.running, sample.job.cached = True, request.job.cached
            self._running[sample.job] = sample
            forked.append(sample)
        request.samples = []
        return forked

    # The end of a request

    def _end_cancelled(self) -> None:
        for request in [each for each in self._requests.values() if each.cancelled]:
            self._end(request, "cancelled")

    def _fail(self, request: Request, error: BaseException) -> None:
        with self._lock, self._change:
            self._end(request, "error", error)
            self._lock.notify_all()

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """A request ends. Holds the lock."""
        if self._requests.get(request.name) is not request:
            return
        samples, request.samples = request.samples, []
        self._running.pop(request.job, None)
        self._waiting.pop(request.job, None)
        self._give_up(request, keep=reason != "error")
        if request.conversation is not None and self._store is not None and reason in ("stop", "length"):
            self._store.open(request.conversation, salt=request.salt).went_on(request.ids)
        request.end(reason, self._clock(), error)
        del self._requests[request.name]
        if request.listener is None:
            self._ended[request.name] = request.output
        request.tell()
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        for sample in samples:  # nobody computes their prompt any more
            if reason == "error":
                self._end(sample, reason, error)
            else:
                self._wait(sample)
        self._lock.notify_all()

    # The thread, the end

    def start(self) -> None:
        """Run steps in a thread of its own whenever there is something to do. Nothing, if it runs."""
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._loop, name="kvtier-engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is at. Requests stay where they are."""
        with self._lock:
            thread, self._stopping = self._thread, True
            self._lock.notify_all()
        if thread is not None:
            thread.join()
        with self._lock:
            self._thread = None
            self._lock.notify_all()

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._stopping and not self._running and not self._waiting:
                    self._lock.wait()
                if self._stopping:
                    return
            try:
                with self._stepping:
                    self._step()
            except Exception as error:
                # A fault of the engine's own: whoever waits is told, and the loop goes on with whatever comes.
                _LOG.exception("A step failed.")
                with self._lock, self._change:
                    for request in list(self._requests.values()):
                        self._end(request, "error", error)

    def close(self) -> None:
        """Cancel what has not ended, put the model's attention back, and give all memory back. Idempotent."""
        if self._closed:
            return
        self.stop()
        with self._stepping, self._lock:
            self._closed = True
            for request in list(self._requests.values()):
                self._end(request, "cancelled")
        self._runner.close()
        if self._prefixes is not None:
            self._prefixes.close()
        if self._enabled is not None:
            self._enabled.disable()
        if self._own_memory:
            self.memory.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This Engine was closed. Make a new one.")

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging, between two steps."""
        with self._lock:
            assert not self._waiting.keys() & self._running.keys(), "a job waits and runs"
            for job, request in self._running.items():
                assert job.running
                assert request.sequence is not None, "a job runs without a sequence"
                assert job.cached == self._runner.cached(request.sequence), "cached tokens are counted wrong"
                assert job.tokens == len(request.ids)
            for job, request in self._waiting.items():
                assert not job.running
                assert request.sequence is None, "a job waits and holds blocks"
        self._runner.check_integrity()
        if self._prefixes is not None:
            self._prefixes.check_integrity()
