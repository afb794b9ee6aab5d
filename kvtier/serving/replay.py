"""`replay`: a load of requests, served by an engine on this machine's clock, and what became of them."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import random
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvtier.errors import ClosedError, ConfigError
from kvtier.hf.engine.settings import token_by_token
from kvtier.hf.models.generation import special_tokens, vocabulary_of
from kvtier.scheduling.simulation.outcome import Outcome, Request, Served
from kvtier.serving.engine import Engine
from kvtier.serving.request import RequestOutput

#: Tokens of the prompts and the answers before the clock begins: they compile kernels and touch memory.
_WARM_UP = (64, 4)
_WARM_REQUESTS = 2
#: Seconds after which it is looked whether the engine's thread is still there.
_LOOK = 1.0
#: As `generate` has it: no end but the length, and the likeliest token.
_TO_LENGTH: dict[str, Any] = {"eos_token_id": -1, "stop_strings": [], "max_time": math.inf, "do_sample": False}


def replay(
    engine: Engine,
    requests: Sequence[Request],
    *,
    block_size: int,
    stateful: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Give an engine the requests of a load when they are due, and wait until all have ended.

    Prompts are random tokens. Two that begin with equal keys begin with equal tokens; one that follows an answer begins
    with its prompt and what was really generated. Every answer is as long as the load says. A request counts from when
    it is due, not from when the engine could be given it, so that a queue before the engine is no gain
    (`Served.arrived`).

    Args:
        engine: with the clock `time.monotonic`, and its thread running. What it has computed before is in no count;
            but a load is found again by the same load, where that is `stateful`.
        requests: see `kvtier.scheduling.simulation.loads`.
        block_size: tokens of a key's block.
        stateful: whether requests may begin with what others have computed.
        seed: of the tokens.
        progress: called with the requests that have ended, and with all, whenever one has.

    Raises:
        BudgetError, ConfigError: the longest request could never be served. Nothing was begun.
        ClosedError: the engine's thread does not run, or has ended.
        Exception: what a request failed with. The others go on, until the engine is closed.
    """
    if not requests:
        raise ConfigError("A load needs at least one request.")
    if not engine.alive:
        raise ClosedError("The engine's thread does not run: call `start`.")
    longest = max(requests, key=lambda request: request.prompt + request.output)
    _check_fits(engine, longest)
    _warm_up(engine, longest.prompt + longest.output)
    return _Replay(engine, _Prompts(engine.model, requests, block_size, seed), stateful, progress).run()


def _check_fits(engine: Engine, longest: Request) -> None:
    """Raise what the engine raises of a request that it could never serve."""
    ids = [_ordinary(engine.model)[0]] * longest.prompt
    engine.cancel(engine.add_request(ids, max_new_tokens=longest.output, **_to_length(engine.model)))


def _warm_up(engine: Engine, most: int) -> None:
    draw, known = random.Random("warm up"), _ordinary(engine.model)
    prompt, output = _WARM_UP
    if prompt + output > most:  # of more tokens there may be no room, nor positions
        prompt, output = most - 1, 1
    options = _to_length(engine.model) | {"max_new_tokens": output, "salt": "warm up"}
    names = [engine.add_request(draw.choices(known, k=prompt), **options) for _ in range(_WARM_REQUESTS)]
    for name in names:
        error = engine.wait(name).error
        if error is not None:
            raise error


def _to_length(model: Any) -> dict[str, Any]:
    """Settings of each request, whatever the model's own generation config asks for."""
    return _TO_LENGTH | token_by_token(model.generation_config)


def _ordinary(model: Any) -> list[int]:
    """Token ids that mean nothing to a model but themselves."""
    special = special_tokens(model)
    known = range(vocabulary_of(model) or 1 << 15)
    return [x for x in known if x not in special] or list(known)


class _Prompts:
    """Token ids of a load's requests, made before the clock begins.

    Args:
        model: whose tokens they are.
        requests: of the load.
        block_size: tokens of a key's block.
        seed: of the tokens.
    """

    def __init__(self, model: Any, requests: Sequence[Request], block_size: int, seed: int) -> None:
        self.requests = requests
        self._known, self._seed, self._size = _ordinary(model), seed, block_size
        #: Tokens of a key's block, and those of a request that are its own.
        self._blocks: dict[Hashable, array[int]] = {}
        self._own: list[array[int]] = []
        for i, request in enumerate(requests):
            before = 0 if request.after is None else requests[request.after].prompt + requests[request.after].output
            shared = 0
            if request.after is None:
                for key in self._keys(request):
                    if key not in self._blocks:
                        self._blocks[key] = self._drawn(f"block {key!r}", block_size)
                    shared += block_size
            self._own.append(self._drawn(f"request {i}", max(request.prompt - before - shared, 0)))

    def ids(self, index: int, said: Sequence[int]) -> list[int]:
        """Of a prompt.

        Args:
            index: which request.
            said: prompt and answer of the request that this one follows; empty: it follows none.
        """
        request = self.requests[index]
        if request.after is not None:
            return [*said[: request.prompt], *self._own[index]]
        blocks = (self._blocks[key] for key in self._keys(request))
        return [*itertools.chain.from_iterable(blocks), *self._own[index]]

    def _keys(self, request: Request) -> tuple[Hashable, ...]:
        """Of the blocks that are all prompt; a conversation's go on with its answers."""
        return request.keys[: request.prompt // self._size]

    def _drawn(self, name: str, count: int) -> array[int]:
        return array("q", random.Random(f"{self._seed} {name}").choices(self._known, k=count))


class _Replay:
    """One load, while it is served.

    Args:
        engine: see `replay`.
        prompts: of the requests.
        stateful, progress: see `replay`.
    """

    def __init__(
        self, engine: Engine, prompts: _Prompts, stateful: bool, progress: Callable[[int, int], None] | None
    ) -> None:
        self._engine, self._prompts, self._stateful, self._progress = engine, prompts, stateful, progress
        self._options = _to_length(engine.model)
        self._ended = queue.SimpleQueue[tuple[int, RequestOutput]]()
        self._followers: dict[int, list[int]] = {}
        #: Seconds from the beginning, and which request is due then.
        self._due: list[tuple[float, int]] = []
        self._said: dict[int, list[int]] = {}
        self._served: list[Served] = []
        for i, request in enumerate(prompts.requests):
            self._served.append(Served(request.arrived, request.prompt, request.output, request.tenant))
            if request.after is None:
                self._due.append((request.arrived, i))
            else:
                self._followers.setdefault(request.after, []).append(i)
        heapq.heapify(self._due)

    def run(self) -> Outcome:
        """All of it."""
        before, began, ended = self._engine.load, time.monotonic(), 0
        while ended < len(self._served):
            now = time.monotonic() - began
            while self._due and self._due[0][0] <= now:
                self._add(heapq.heappop(self._due)[1])
            try:
                wait = min(self._due[0][0] - now, _LOOK) if self._due else _LOOK
                index, output = self._ended.get(timeout=max(wait, 0))
            except queue.Empty:
                if not self._engine.alive:
                    raise ClosedError("The engine's thread has ended.") from None
                continue
            self._end(index, output, began)
            ended += 1
            if self._progress is not None:
                self._progress(ended, len(self._served))
        after, seconds = self._engine.load, max(x.finished for x in self._served)
        return Outcome(
            self._served,
            seconds=seconds,
            steps=after.steps - before.steps,
            computed=after.computed - before.computed,
            rows=after.rows - before.rows,
        )

    def _add(self, index: int) -> None:
        request, ended = self._prompts.requests[index], self._ended

        def hear(output: RequestOutput) -> None:
            if output.is_finished():
                ended.put((index, output))

        self._engine.add_request(
            self._prompts.ids(index, self._said.pop(index, ())),
            priority=request.priority,
            tenant=request.tenant,
            salt=None if self._stateful else f"request {index}",
            listener=hear,
            max_new_tokens=request.output,
            **self._options,
        )

    def _end(self, index: int, output: RequestOutput, began: float) -> None:
        """A request has ended, and those that follow it are due some time later."""
        if output.error is not None:
            raise output.error
        cancelled = output.finish_reason == "cancelled"  # in the middle of its answer, too
        if cancelled or output.scheduled is None or output.first_token is None or output.finished is None:
            raise ClosedError(f"Request {index} was {output.finish_reason}.")
        served = self._served[index]
        served.scheduled, served.first = output.scheduled - began, output.first_token - began
        served.finished, served.reused = output.finished - began, output.cached_tokens
        served.swapped, served.recomputed = output.swapped, output.preempted - output.swapped
        for i in self._followers.get(index, ()):
            self._said[i] = [*output.prompt_ids, *output.generated_tokens]
            self._served[i].arrived = served.finished + self._prompts.requests[i].arrived
            heapq.heappush(self._due, (self._served[i].arrived, i))
