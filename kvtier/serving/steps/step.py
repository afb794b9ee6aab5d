"""`StepRunner`: what a step of an engine does, from the scheduler's plan to the tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.errors import BudgetError, ConfigError
from kvtier.hf.engine.sampling import choose
from kvtier.scheduling.job import Job, Load, Step, Ways
from kvtier.scheduling.prices import RECOMPUTE
from kvtier.scheduling.scheduler import Scheduler
from kvtier.serving.costs import Costs
from kvtier.serving.prefixes import Prefixes
from kvtier.serving.request import Chosen, Request
from kvtier.serving.requests import Requests
from kvtier.serving.runners.runner import Runner, Tiers, Work
from kvtier.stats import Counters

_LOG = logging.getLogger("kvtier.serving")

#: Seconds until it is looked again whether what a request waits for was loaded.
_PAUSE = 0.001
#: Steps between two looks at what copies took.
_COPIES = 16
#: Times that failures may cost a request what it had computed.
_MOST_LOST = 2
#: Why processes that share a model do not agree.
_APART = (
    "The model is divided over processes, which do not compute the same requests: add the same ones in the same order "
    "in each of them; those that sample with a `seed`. With spill=False, give preemption='swap' or 'recompute'."
)


class StepRunner:
    """Computes steps. One thread at a time.

    Args:
        requests: that there are.
        runner: that computes them.
        prefixes: what they begin with; None: each begins with nothing.
        scheduler: which says what a step works on.
        costs: which learn from steps.
        ways: how what is preempted comes back.
        max_tokens, max_running: tokens of a step, requests that run at a time.
        spill: whether what runs may be on the host.
        clock: seconds.
        copied: what was copied between the tiers so far, and how long that took.

    Attributes:
        count: of steps that were begun.
        computed, rows: tokens that they computed, and sequences that had a part, summed over all steps.
        max_tokens: see above.
        blocks: that may be had and that are held, as far as they were counted last.
    """

    def __init__(
        self,
        requests: Requests,
        runner: Runner,
        prefixes: Prefixes | None,
        *,
        scheduler: Scheduler,
        costs: Costs,
        ways: Ways,
        max_tokens: int,
        max_running: int,
        spill: bool,
        clock: Callable[[], float],
        copied: Callable[[], Counters],
    ) -> None:
        self._requests = requests
        self._runner = runner
        self._prefixes = prefixes
        self._scheduler = scheduler
        self._costs = costs
        self._ways = ways
        self._max_running = max_running
        self._spill = spill
        self._clock = clock if runner.processes is None else runner.processes.clock(clock)
        self._apart = 0  # plans in a row in which the processes of the model differed
        self._given: list[Request] = []  # those that were given a token in this step
        self._copied = copied
        self.max_tokens = max_tokens
        self.count = self.computed = self.rows = 0
        self.blocks = runner.blocks()[:2]

    @property
    def divided(self) -> bool:
        """Whether the model is divided over processes, which have to compute the same steps."""
        return self._runner.processes is not None

    def step(self) -> bool:
        """Compute one. Whether there was anything to do."""
        work = self._planned()
        if work is None:
            return False
        if not work:
            return True
        tokens = sum(each.tokens for _, each in work)
        self.count, self.computed, self.rows = self.count + 1, self.computed + tokens, self.rows + len(work)
        self._given = []
        began = self._clock()
        for group in self._runner.forwards([each for _, each in work]):
            # Who was preempted for the sake of a part before has no part any more.
            part = [work[i] for i in group if work[i][0].sequence is work[i][1].sequence]
            if part:
                self._run(part)
        took = self._clock() - began
        self._runner.took(took)
        self._costs.observe(tokens, sum(each.tokens * (each.cached + each.tokens) for _, each in work), took)
        self._check_given(work)
        if self.count % _COPIES == 0:
            self._costs.copied(self._copied())
        return True

    # The plan

    def _planned(self) -> list[tuple[Request, Work]] | None:
        """What is computed now; None: there is nothing to do."""
        requests = self._requests
        with requests.lock, requests.change:
            requests.check_open()
            requests.recover()
            requests.end_cancelled()
            if not requests.running and not requests.waiting:
                return None
            if self._prefixes is not None:
                self._prefixes.watch()
            plan = self._plan()
            for job in plan.preempt:
                requests.preempt(job, plan.ways.get(job, RECOMPUTE))
            work = [each for job, n in plan.tokens.items() for each in self._admitted(job, n)]
            if not work and not plan.preempt:
                # What somebody waits for is on its way from the disk.
                requests.lock.wait(_PAUSE)
            return work if self._alike(work) else []

    def _alike(self, work: list[tuple[Request, Work]]) -> bool:
        """Whether all processes of the model compute this. Where they do not (one has had less room, say), each drops
        what it keeps and begins its requests again, after which they are alike."""
        processes = self._runner.processes
        if processes is None:
            return True
        if processes.same(
            [(x.name, each.cached, *each.ids[each.cached : each.cached + each.tokens]) for x, each in work]
        ):
            self._apart = 0
            return True
        self._requests.books.interrupted = True
        self._apart += 1
        if self._apart > _MOST_LOST:
            raise ConfigError(_APART)
        return False

    def _check_given(self, work: list[tuple[Request, Work]]) -> None:
        """Raise `ConfigError` unless all processes of the model have given the same tokens, and let the same requests
        end. One whose requests have all ended computes no step any more, in which the others could tell."""
        processes = self._runner.processes
        if processes is None:
            return
        given = dict.fromkeys([*(x for x, _ in work), *self._given])
        if not processes.same([(x.name, len(x.ids), x.ids[-1], x.output.finish_reason) for x in given]):
            raise ConfigError(_APART)

    def _plan(self) -> Step:
        """What the scheduler says where nobody is let in who waits for what another one computes. Holds the lock."""
        while True:
            plan = self._scheduler.plan(self._load())
            if not self._requests.hold_back(plan.tokens):
                return plan

    def _admitted(self, job: Job, tokens: int) -> list[tuple[Request, Work]]:
        """A job's part of a step. What fails as it begins takes no other with it. Holds the lock."""
        requests = self._requests
        request = requests.running.get(job) or requests.waiting[job]
        try:
            return [(requests.admit(job), self._work(request, tokens))]
        except AssertionError:
            raise  # of no request: what is counted does not agree
        except Exception as error:
            _LOG.warning("Request %r failed as it began: %s", request.name, error)
            requests.end(request, "error", error)
            return []

    def _load(self) -> Load:
        """What the scheduler decides on. Holds the lock."""
        requests = self._requests
        total, used, size = self._runner.blocks()
        self.blocks = total, used
        for job, request in requests.running.items():
            job.blocks = self._runner.held(request.sequence)
        tiers = Tiers() if self._spill else self._runner.tiers()
        on_host = tiers.host_blocks
        if on_host:
            self._costs.machine(tiers.block_bytes // size, tiers.overlaps, tiers.rates)
        now = self._clock()
        return Load(
            now,
            list(requests.running),
            [job for job, request in requests.waiting.items() if not self._waits_for_another(request, now)],
            total - used - on_host,
            size,
            self.max_tokens,
            self._max_running,
            self._runner.chunked,
            self._costs.rate,
            on_host - sum(-(-job.swapped // size) for job in requests.waiting) if on_host else 0,
            self._ways,
            requests.shares.served,
        )

    def _waits_for_another(self, request: Request, now: float) -> bool:
        return self._prefixes is not None and self._prefixes.waits(request, now)

    def _work(self, request: Request, tokens: int) -> Work:
        job = request.job
        tokens = min(tokens, job.left) if self._runner.chunked else job.left
        if self._prefixes is not None:
            tokens = self._prefixes.part(job, tokens)
        scored, prompt = job.cached + tokens == job.tokens, len(request.output.prompt_ids)
        return Work(request.sequence, request.ids, job.cached, tokens, scored, prompt)

    # The forward, and what becomes of one that fails

    def _run(self, work: list[tuple[Request, Work]]) -> None:
        """Compute a part of a step. A request that fails takes no other with it."""
        whole = work
        while work:
            try:
                scores = self._runner.step([each for _, each in work])
            except BudgetError as error:
                # Who was left out for one that has given way since has its turn.
                work = self._with_less(work, error) or self._still(whole)
            except Exception as error:
                alone, work = len(work) == 1, self._follow(work, error)
                if alone and work:
                    self._fail(work[0][0], error)
                    return
                if work:
                    _LOG.warning("A step of %d requests failed, and each is tried alone: %s", len(work), error)
                for each in work:
                    if self._still([each]):  # for want of room one may have been preempted for another one meanwhile
                        self._run([each])
                return
            else:
                self._deliver(work, scores)
                return

    def _with_less(self, work: list[tuple[Request, Work]], error: BudgetError) -> list[tuple[Request, Work]]:
        """What is left of a part of a step for which there was no room: less of it, or fewer others."""
        work = self._follow(work, error, counts=len(self._requests.running) == 1)
        if not work:
            self._preempt_last()
            return []
        prompts = [i for i, (_, each) in enumerate(work) if each.tokens > 1]
        if prompts and len(work) > 1:
            return [each for i, each in enumerate(work) if i != prompts[-1]]
        last = self._preempt_last()
        if last is not None:
            return [(r, w) for r, w in work if r.job is not last]
        ((request, each),) = work
        if self._runner.chunked and each.tokens > 1:
            return [(request, self._work(request, each.tokens // 2))]
        if self._prefixes is not None and not request.alone:
            # What is kept of it, and a copy of its last block, take room that it needs.
            request.alone = True
            with self._requests.lock, self._requests.change:
                self._requests.preempt(request.job)
            return []
        self._fail(request, error)
        return []

    @staticmethod
    def _still(work: list[tuple[Request, Work]]) -> list[tuple[Request, Work]]:
        """What of a part can be computed as it is: no request of it has got further, or given up its sequence."""
        return [(x, each) for x, each in work if x.sequence is each.sequence and x.job.cached == each.cached]

    def _preempt_last(self) -> Job | None:
        """Preempt the last in rank of the jobs that run; None: there are not several."""
        jobs = self._requests.running
        if len(jobs) < 2:
            return None
        last = max(jobs, key=lambda job: (-job.priority, job.number))
        with self._requests.lock, self._requests.change:
            self._requests.preempt(last)
        return last

    def _follow(
        self, work: list[tuple[Request, Work]], error: Exception, *, counts: bool = True
    ) -> list[tuple[Request, Work]]:
        """After a failure: what of a part can be tried again as it is. A sequence that the failure has cost what was
        computed (recurrent states do not go back) begins again with the next step; for the third time, it has failed.

        Raises:
            Exception: the same, where the runner is of no use before it is reset: the step is cut short.
        """
        if self._runner.half_done:
            raise error
        same = []
        for request, each in work:
            cached = self._runner.cached(each.sequence)
            assert cached <= each.cached, "tokens count, and what was to follow them is lost"
            request.job.cached = cached
            if cached == each.cached:
                same.append((request, each))
                continue
            request.lost += counts
            if request.lost > _MOST_LOST:
                self._fail(request, error)
        return same

    def _fail(self, request: Request, error: BaseException) -> None:
        requests = self._requests
        with requests.lock, requests.change:
            requests.end(request, "error", error)
            requests.lock.notify_all()

    # The tokens

    def _deliver(self, work: list[tuple[Request, Work]], scores: Sequence[Any]) -> None:
        """Give each sequence that has its prompt a new token. All are chosen before anything is counted: who has no
        token fails alone, and of the others nothing is half done."""
        now, requests = self._clock(), self._requests
        found = _chosen(
            [
                (each, row)
                for (request, _), row in zip(work, scores, strict=True)
                if row is not None and not request.cancelled
                for each in (request, *request.samples)
                if not each.done.is_set()
            ]
        )
        with requests.lock, requests.change:
            for (request, each), row in zip(work, scores, strict=True):
                request.job.cached += each.tokens
                requests.shares.serve(request.job.tenant, each.tokens, 0)
                if row is None or request.output.first_token is None:
                    requests.computed(request)
                if request in found:
                    requests.fork(request, self._max_running)
            self._given += found
            for request, chosen in found.items():
                if isinstance(chosen, Exception):
                    requests.end(request, "error", chosen)
                else:
                    self._give(request, chosen, now)
            requests.lock.notify_all()

    def _give(self, request: Request, chosen: Chosen, now: float) -> None:
        """A new token of a request. Holds the lock."""
        if request.done.is_set():
            return
        if request.output.first_token is None:
            request.output.first_token = now
        request.give(chosen)
        self._requests.shares.serve(request.job.tenant, 0, 1)
        reason = self._requests.ends(request)
        if reason:
            self._requests.end(request, reason)
        elif reason is not None:
            request.tell()


def _chosen(asking: Sequence[tuple[Request, torch.Tensor]]) -> dict[Request, Chosen | Exception]:
    """The next token of each request by scores `[vocabulary]`, or why it has none. Changes no request."""
    tokens = choose([row for _, row in asking], [x.sampling for x, _ in asking], [x.ids for x, _ in asking])
    found: dict[Request, Chosen | Exception] = {}
    for (request, row), token in zip(asking, tokens, strict=True):
        try:
            found[request] = token if isinstance(token, Exception) else request.chosen(token, row)
        except Exception as error:
            found[request] = error
    return found
