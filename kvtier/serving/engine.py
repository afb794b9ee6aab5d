"""`Engine`: many requests on one tiered memory, whose batch is made at each step."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from kvtier.config import CacheOptions, Size, checks_names, parse_bytes, parse_number
from kvtier.conversation.given.arguments import check_count
from kvtier.conversation.store import ConversationStore
from kvtier.errors import ConcurrentUseError, ConfigError, UnsupportedError
from kvtier.hf.engine.copies import options_of_each
from kvtier.hf.engine.sampling import Sampling
from kvtier.hf.models import generation as of
from kvtier.hf.models.positions import table_of_positions
from kvtier.kernels import launch
from kvtier.memory import measured
from kvtier.memory.tiered import TieredMemory
from kvtier.scheduling.names import SchedulerName, scheduler_of
from kvtier.scheduling.prices import RECOMPUTE, SWAP, Always
from kvtier.scheduling.scheduler import Scheduler
from kvtier.serving.batch import Batch
from kvtier.serving.costs import Costs
from kvtier.serving.prefixes import prefixes_of
from kvtier.serving.request import EngineLoad, Listener, Prepared, Request, RequestOptions, RequestOutput, prompt_of
from kvtier.serving.requests import Requests
from kvtier.serving.runners.choice import allow_sub_batches, choose_runner
from kvtier.serving.runners.packed import PackedRunner
from kvtier.serving.steps.loop import Loop
from kvtier.serving.steps.step import StepRunner

_LOG = logging.getLogger("kvtier.serving")

#: Requests that wait, beyond which more are refused.
MAX_WAITING = 4096
PREEMPTION = ("price", SWAP, RECOMPUTE)
_OWN_TIME = "the model is divided over processes, each of which would end it at another step. Give a length instead."


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
        tokenizer: for stop strings, which may begin in the prompt's last characters, as those of `generate` may.
        store: a `ConversationStore` of the model, whose memory, block size and host attention are then the engine's:
            requests begin with what its calls, and requests before, have left, and leave what they compute to it. None:
            the engine keeps that itself, until it is closed.
        device_budget, host_budget: as of `TieredMemory`.
        memory: a `TieredMemory` that others use too; budgets are then its own.
        block_size, host_attention: as of `TieredKVCache`; the default block is 64 tokens, for many short requests.
        max_batch_tokens: computed in one step, at the most.
        max_running: requests that run at a time.
        max_waiting: requests that wait, beyond which `add_request` refuses.
        scheduler: "fair" (highest response ratio next: AdaptiveLLM, section 4), "fcfs" (first come, first served), or a
            `kvtier.Scheduler`.
        runner: "packed" (one forward for all), "ragged" (the same for models with recurrent states), "single" (a
            forward for each), or "auto": the first that gives the model's own scores in a trial of a few tokens.
        sub_batches: whether a step may be computed by two forwards that take turns, so that attention on the host hides
            behind what the device computes (Neo, section 3.1); "auto": where that can be, and was tested.
        spill: whether what runs may outgrow the device budget: its blocks are then on the host, too, attended to there
            or fetched for each step. False: what runs is on the device, and what outgrows that is preempted.
        preemption: how a request comes back that had to give up its blocks: "swap", its blocks wait on the host (where
            `spill` leaves that free); "recompute", they are kept as long as nobody needs the room, and the rest is
            computed again; "price", whichever takes less time, by what steps and copies took so far.
        state_budget: bytes of all copies of recurrent states, where the model is, with which requests of a model that
            has such states begin. Those of a store are within its own. 0: nothing of such a model is used again.
        clock: seconds.

    Raises:
        ConfigError: an option that is malformed.
        UnsupportedError: an encoder-decoder; or `runner="packed"`, and the model cannot be packed; or no way of running
            it gives its own scores.
    """

    @checks_names
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
        scheduler: Scheduler | SchedulerName = "fair",
        runner: Literal["auto", "packed", "ragged", "single"] = "auto",
        sub_batches: bool | Literal["auto"] = "auto",
        spill: bool = True,
        preemption: Literal["price", "swap", "recompute"] = "price",
        state_budget: Size = "1GiB",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        of.check_model(model)
        options = CacheOptions.parse(block_size, host_attention) if store is None else store.caches.options
        check_count("max_batch_tokens", max_batch_tokens, 1)
        check_count("max_running", max_running, 1)
        check_count("max_waiting", max_waiting, 1)
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
        states = parse_bytes("state_budget", state_budget, zero=True)
        chosen = scheduler_of(scheduler)
        self._vocabulary, self._positions = of.vocabulary_of(model), table_of_positions(model)
        self._model = model
        self._tokenizer = tokenizer
        self._own_memory = memory is None
        if memory is None:
            memory = TieredMemory(
                device_budget=device_budget, host_budget="auto" if host_budget is None else host_budget
            )
        self.memory = memory
        self._enabled = None
        self._closed = False
        self._costs = costs = Costs(max_batch_tokens, measured.hardware(of.device_of(model)).rates())
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back)
            with launch.on(of.device_of(model)):
                self._runner, self._enabled = choose_runner(model, memory, options, runner)
                undo.callback(self._runner.close)
            if self._enabled is not None:
                # What is left when all that may run a step is garbage, also the thread of an engine that is not closed.
                self._enabled.end_with(self._runner)
            allow_sub_batches(self._runner, model, memory, sub_batches)
            self._prefixes = prefixes_of(model, self._runner, store, costs, states)
            if self._prefixes is not None:
                undo.callback(self._prefixes.close)
            self._store = store
            self._requests = Requests(self._runner, self._prefixes, store, costs, max_waiting, clock)
            self._steps = StepRunner(
                self._requests,
                self._runner,
                self._prefixes,
                scheduler=chosen,
                costs=costs,
                ways=costs if preemption == "price" else Always(preemption),
                max_tokens=max_batch_tokens,
                max_running=max_running,
                spill=bool(spill),
                clock=clock,
                copied=memory.totals,
            )
            self._loop = Loop(
                self._requests, self._steps, memory, functools.partial(of.device_of, model), weakref.ref(self)
            )
            undo.pop_all()
        if store is not None:
            store.engines.add(self)

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
    def closed(self) -> bool:
        """Whether `close` has come to its end."""
        return self._closed

    @property
    def model(self) -> Any:
        """Of Transformers."""
        return self._model

    @property
    def max_waiting(self) -> int:
        """Requests that may wait."""
        return self._requests.max_waiting

    @property
    def steps(self) -> int:
        """That were computed."""
        return self._steps.count

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._loop.alive

    @property
    def load(self) -> EngineLoad:
        """What there is to do now, and how much of the memory that takes. At any time and without waiting: while a
        step has the memory, blocks are as it found them when it began. So they are in the middle of a change of the
        memory, and behind one that was interrupted."""
        lock, steps = self.memory.lock, self._steps
        if lock.acquire(blocking=False):
            try:
                with contextlib.suppress(ConcurrentUseError):
                    steps.blocks = self._runner.blocks()[:2]
            finally:
                lock.release()
        (running, waiting), (total, held) = self._requests.counts, steps.blocks
        return EngineLoad(
            running, waiting, held, total, self._costs.rate, steps.count, steps.computed, steps.rows, self.alive
        )

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
            seed: of the request's own random numbers; None: one that torch's generator on the CPU gives now.
            logprobs: whether the log-probability of each token is kept.
            top_logprobs: how many of the likeliest tokens are kept at each place, with their log-probabilities.
            salt: what is kept of a request is found by those with an equal salt only, so that tenants share nothing.
            conversation: of the store, whose history prompt and answer become when the request has ended. Of several
                sequences the first one is its turn.
            tenant: whose it is: under the fair scheduler, the tenant that was served least goes next.
            listener: called with the output of each of the request's sequences whenever it has a new token, and when it
                has ended. In the thread that runs the steps, under the engine's lock: it must not block. The engine
                keeps no output of a request with a listener that has ended.
            options: settings of `generate`, `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`. With
                `num_return_sequences` there are more sequences of the prompt, named `NAME#1`, `NAME#2` and so on, which
                share its blocks; each of them has copies of these objects, which may keep what they see of a sequence.

        Returns:
            The name.

        Raises:
            BudgetError: it could never fit the budgets. QueueFullError: too many wait.
            ConfigError: no tokens, or none of the model's; more of them than it may have; a name in use, an option that
                is malformed or that `generate` does not know or take, such as several sequences without sampling.
            UnsupportedError: beams, and other ways to decode that are not token by token; several sequences, and a
                processor or a criterion cannot be copied.
        """
        terms = RequestOptions(request_id, priority, logprobs, top_logprobs, salt, conversation, tenant, listener)
        first, *_ = self._add(self._prepared(ids, generation_config, terms, seed, options))
        return first.name

    def _prepared(
        self,
        ids: Any,
        generation_config: Any,
        terms: RequestOptions,
        seed: int | None,
        options: dict[str, Any],
        row: int = 0,
    ) -> Prepared:
        """What a prompt, which is that row of a batch, asks for; with a seed, where it has none, of torch's."""
        prompt = prompt_of(ids)
        if not prompt:
            raise ConfigError("A request needs at least one token.")
        most = self._vocabulary
        wrong = [] if most is None else [x for x in prompt if not 0 <= x < most]
        if most is not None and wrong:
            raise ConfigError(
                f"Token ids are from 0 to {most - 1}, and {wrong[0]} is none. Is the tokenizer another model's?"
            )
        if terms.conversation is not None and self._store is None:
            raise ConfigError("conversation= needs an engine with a store.")
        given = {"tokenizer": self._tokenizer, "seed": seed, "row": row}
        sampling = Sampling(self._model, prompt, generation_config, **given, **options)
        if self._positions is not None and sampling.max_length - 1 > self._positions:  # the last token is not computed
            raise ConfigError(
                f"A prompt of {len(prompt)} tokens that may grow to {sampling.max_length} has more than the "
                f"{self._positions} positions of the model, which has no others. Lower max_new_tokens, or the prompt."
            )
        if sampling.is_timed and self._steps.divided:
            raise ConfigError(f"max_time: {_OWN_TIME}")
        if sampling.count > self.max_waiting:
            raise ConfigError(f"{sampling.count} sequences of a prompt are more than may wait: {self.max_waiting}.")
        return Prepared(prompt, sampling.each(), terms)

    def _add(self, asked: Prepared) -> list[Request]:
        """A request for each sequence of a prompt."""
        requests, terms = self._requests, asked.terms
        # Held until it is the request's: it is read here, if it is on the disk, and steps do not wait for that.
        chat = None if terms.conversation is None or self._store is None else self._store.find(terms.conversation)
        with self.memory.lock:
            self.memory.follow()  # what steps read of the request, such as a processor's tensors, may be being made
        with requests.lock, requests.change:
            requests.check_open()
            made = requests.add(*asked)
        del chat
        return made

    def cancel(self, request_id: str) -> None:
        """Let a request end at the next step; its output says "cancelled". Nothing, if it has ended."""
        requests = self._requests
        with requests.lock, requests.change:
            request = requests.named.get(request_id)
            if request is not None:
                request.cancelled = True
                requests.lock.notify_all()

    def stream(self, request_id: str, timeout: float | None = None) -> Iterator[int]:
        """The tokens of a request as they come; call `output` for how it ended. Each token is given once.

        Args:
            request_id: as `add_request` returned it.
            timeout: seconds to wait for a token; what the caller does between two tokens is no part of them.

        Raises:
            ConfigError: no such request, or `timeout` is no number. TimeoutError: no token came for so long.
                What the request failed with.
        """
        request = self._request(request_id)
        output = self.output(request_id) if request is None else request.output
        if request is None:
            yield from output.generated_tokens
        else:
            yield from self._tokens_of(request, timeout)
        if output.error is not None:
            raise output.error

    def _request(self, name: str) -> Request | None:
        """One that has not ended."""
        with self._requests.lock:
            return self._requests.named.get(name)

    def _tokens_of(self, request: Request, timeout: float | None) -> Iterator[int]:
        given, over = 0, False
        while not over:
            self._wait_until(functools.partial(request.goes_beyond, given), timeout, "No token of", request)
            with self._requests.lock:
                new, over = request.output.generated_tokens[given:], request.done.is_set()
            yield from new
            given += len(new)

    def _wait_until(self, there: Callable[[], bool], timeout: float | None, what: str, request: Request) -> None:
        if timeout is not None and self._steps.divided:
            raise ConfigError(f"timeout={timeout}: {_OWN_TIME}")
        end = None if timeout is None else time.monotonic() + parse_number("timeout", timeout, "seconds")
        if not self._loop.run_until(there, end):
            raise TimeoutError(f"{what} {request.name!r} came in {timeout} seconds.")

    def output(self, request_id: str) -> RequestOutput:
        """What there is of a request; of those that have ended, the last 4096 are kept. Raises `ConfigError`."""
        found = self._requests.output(request_id)
        if found is None:
            raise ConfigError(f"There is no request {request_id!r}.")
        return found

    def wait(self, request_id: str, timeout: float | None = None) -> RequestOutput:
        """The output of a request when it has ended. What it failed with is its `error`.

        Args:
            request_id: as `add_request` returned it.
            timeout: seconds to wait for its end.

        Raises:
            ConfigError: no such request, or `timeout` is no number. TimeoutError: it has not ended by then; it goes on.
        """
        request = self._request(request_id)
        if request is None:
            return self.output(request_id)
        self._wait_until(request.done.is_set, timeout, "No end of", request)
        return request.output

    def generate_batch(
        self, inputs: Sequence[Any], generation_config: Any = None, **options: Any
    ) -> dict[str, RequestOutput]:
        """Generate for all of these prompts.

        Args:
            inputs: token ids of each.
            generation_config, options: as of `add_request`, for all of them. Prompts behind the first have copies of
                processors and criteria.

        Returns:
            The outputs by name, in the order of `inputs`. Those that failed have an `error`.

        Raises:
            UnsupportedError: as of `add_request`. Whatever is raised, as by Ctrl-C, cancels them all.
            ConfigError: a `request_id` or a `conversation` for several prompts. Nothing was begun.
        """
        self._loop.check_outside()
        terms = RequestOptions(**{name: options.pop(name) for name in RequestOptions.names() & options.keys()})
        seed = options.pop("seed", None)
        prompts = list(map(prompt_of, inputs))
        terms.check_prompts(len(prompts))
        own = options_of_each(options, len(prompts))

        def prepare(number: int) -> Prepared:
            return self._prepared(prompts[number], generation_config, terms, seed, next(own), row=number)

        name = None if terms.request_id is None else str(terms.request_id)
        found = Batch(self._requests, self._loop, prepare, self._add).run(prompts, name)
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
        return self._loop.step()

    # The thread, the end

    def start(self) -> None:
        """Run steps in a thread of its own whenever there is something to do. Nothing, if it runs.

        Raises:
            UnsupportedError: the model is divided over processes, in which threads would not compute the same steps.
        """
        self._loop.start()

    def stop(self) -> None:
        """End the thread after the step that it is at. Requests stay where they are."""
        self._loop.stop()

    def close(self) -> None:
        """Cancel what has not ended, put the model's attention back, and give all memory back. Idempotent; what an
        interrupt cuts short is done by another call."""
        requests = self._requests
        if self._closed:
            return
        self.stop()
        with self._loop.stepping, requests.lock, requests.change:
            requests.closed = True
            requests.cancel_all()
        self.stop()  # a thread that another one has started meanwhile
        self._runner.close()
        if self._prefixes is not None:
            self._prefixes.close()
        self._give_back()
        self._closed = True

    def _give_back(self) -> None:
        """The model's attention, and what memory is the engine's own."""
        if self._enabled is not None:
            self._enabled.disable()
        if self._own_memory:
            self.memory.close()

    def __enter__(self) -> Engine:
        if not self._steps.divided:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        running, waiting = self._requests.counts
        return f"Engine({'closed' if self._closed else f'{self.runner}, {running} running, {waiting} waiting'})"

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging, between two steps."""
        with self._requests.lock:
            self._requests.check_integrity()
        self._runner.check_integrity()
        if self._prefixes is not None:
            self._prefixes.check_integrity()
