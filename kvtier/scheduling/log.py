"""The log of a scheduler: what it was asked at each step and what it answered, so that a run can be scheduled again.

    scheduler = LoggedScheduler("fair", "schedule.jsonl")
    with kvtier.Engine(model, scheduler=scheduler) as engine:
        ...
    scheduler.close()
    assert not replay("schedule.jsonl", "fair").differences

Who is let in, who is preempted, and how it comes back (AdaptiveLLM, section 3.4) depends on numbers only: they are all
in the log, with the prices as they were learned until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.reports.log_file import SCHEDULE, LogFile, Question, Replay, class_of, decided_again, number, typed
from kvtier.scheduling.job import Job, Load, Step, Ways
from kvtier.scheduling.names import name_of, scheduler_of
from kvtier.scheduling.prices import Always, Prices
from kvtier.scheduling.scheduler import Scheduler

_JOB = tuple(x.name for x in fields(Job))
#: Fields of a load that are numbers.
_NUMBERS = tuple(x.name for x in fields(Load) if x.name not in ("running", "waiting", "ways", "served"))


class LoggedScheduler(Scheduler):
    """Decides as another scheduler does, and writes down each question with its answer.

    What is decided does not depend on the file: where it cannot be written any more, it ends there with a warning.

    Args:
        scheduler: that decides, an object or a name.
        path: of the file, which is replaced. One JSON object a step, with the jobs that changed since the last one.

    Raises:
        OSError: there can be no such file.
        ConfigError: there is no such scheduler, or another log is written to this file; of `plan`, ways are none that a
            log takes.
    """

    def __init__(self, scheduler: Scheduler | str, path: str | Path) -> None:
        self.scheduler = scheduler_of(scheduler)
        self._log = LogFile(path, {"log": SCHEDULE, "scheduler": name_of(self.scheduler)} | class_of(self.scheduler))
        #: Jobs as the log has them.
        self._known: dict[int, list[Any]] = {}

    def key(self, job: Job, load: Load) -> Any:
        """See `Scheduler.key`."""
        return self.scheduler.key(job, load)

    def order(self, load: Load) -> list[Job]:
        """See `Scheduler.order`."""
        return self.scheduler.order(load)

    def prompt_order(self, ranked: list[Job], load: Load) -> list[Job]:
        """See `Scheduler.prompt_order`."""
        return self.scheduler.prompt_order(ranked, load)

    def plan(self, load: Load) -> Step:
        """See `Scheduler.plan`."""
        # What is decided on is what the log has: prices are still learned meanwhile, by other threads.
        tenants = {job.tenant for job in (*load.running, *load.waiting)}
        served = {tenant: load.served[tenant] for tenant in sorted(tenants) if tenant in load.served}
        load = replace(load, ways=None if load.ways is None else load.ways.now(), served=served)
        asked = self._asked(load)
        step = self.scheduler.plan(load)
        self._log.write({"step": asked, "answer": _decided(step)})
        return step

    def close(self) -> None:
        """End the log. The scheduler decides on without it."""
        self._log.close()

    def _asked(self, load: Load) -> dict[str, Any]:
        jobs = {job.number: [getattr(job, name) for name in _JOB] for job in (*load.running, *load.waiting)}
        changed = [job for job in jobs.values() if self._known.get(job[0]) != job]
        self._known = jobs
        numbers = {name: getattr(load, name) for name in _NUMBERS}
        return numbers | {
            "jobs": changed,
            "running": [job.number for job in load.running],
            "waiting": [job.number for job in load.waiting],
            "ways": None if load.ways is None else _priced(load.ways),
            "served": load.served,
        }


def replay(path: str | Path, scheduler: Scheduler | str) -> Replay:
    """Ask a scheduler what another one was asked, and compare the answers.

    Args:
        path: of a log.
        scheduler: unused so far, made as the one in the log was; or a name.

    Raises:
        ConfigError: the file is not such a log, or the scheduler fails at one of its questions; there is no such
            scheduler.
        OSError: it cannot be read.
    """
    return decided_again(path, SCHEDULE, "scheduler", _Asks(scheduler_of(scheduler)))


class _Asks:
    """Asks a scheduler again, line by line: a job is the same object in each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._jobs: dict[int, Job] = {}

    def __call__(self, line: dict[str, Any]) -> Question:
        given, was = dict(line["step"]), line["answer"]
        for values in given.pop("jobs"):
            new = typed(Job(**dict(zip(_JOB, values, strict=True))))
            job = self._jobs.setdefault(new.number, new)
            for name in _JOB:
                setattr(job, name, getattr(new, name))
        running, waiting = ([self._jobs[number("job", x)] for x in given.pop(name)] for name in ("running", "waiting"))
        self._jobs = {job.number: job for job in (*running, *waiting)}
        served = {str(tenant): float(x) for tenant, x in given.pop("served").items()}
        ways = _ways(given.pop("ways"))
        load = typed(Load(**given, running=running, waiting=waiting, ways=ways, served=served))
        return lambda: ("step", was, _decided(self._scheduler.plan(load)))


def _priced(ways: Ways) -> dict[str, Any]:
    """Prices as JSON has them. Raises ConfigError: they are of a class of the user's own."""
    if isinstance(ways, Always):
        return {"always": ways.which}
    if isinstance(ways, Prices):
        return asdict(ways)
    raise ConfigError(f"{ways!r}: a log takes ways that are kvtier.scheduling.prices.Prices, or Always.")


def _ways(given: Mapping[str, Any] | None) -> Ways | None:
    if given is None:
        return None
    return Always(str(given["always"])) if "always" in given else typed(Prices(**given))


def _decided(step: Step) -> dict[str, Any]:
    """A step as JSON has it, its jobs by number."""
    return {
        "tokens": [[job.number, tokens] for job, tokens in step.tokens.items()],
        "preempt": [job.number for job in step.preempt],
        "ways": [[job.number, way] for job, way in step.ways.items()],
    }
