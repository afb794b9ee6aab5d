"""Of prompts that begin alike, the one that begins first computes what they share, and the others wait for no more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from workloads import by_generate, model_of, same, stream_of_tokens

from kvtier import Engine, Scheduler
from kvtier.scheduling.job import Job, Load

NEW = 4
HEAD = stream_of_tokens(1)[:64]
#: What both begin with, and of the first one several steps more.
LONG, SHORT = [*HEAD, *stream_of_tokens(2), *stream_of_tokens(3)], [*HEAD, *stream_of_tokens(4)[:8]]


class Shortest(Scheduler):
    """What is computed soonest goes first, whether it runs or not."""

    def key(self, job: Job, load: Load) -> Any:
        return job.left


def engine_of(**options: Any) -> Engine:
    """Whose clock goes on by itself."""
    clock = itertools.count().__next__
    options = {"block_size": 16, "max_batch_tokens": 64, **options}
    return Engine(model_of("llama"), host_budget="16MiB", clock=lambda: clock() * 1e-3, **options)


def play(engine: Engine, names: list[str]) -> list[Any]:
    """The outputs when all have ended; their tokens are those of `generate`."""
    while engine.step():
        engine.check_integrity()
    found = [engine.output(name) for name in names]
    for each in found:
        assert each.error is None
        assert same("llama", tuple(each.prompt_ids), each.generated_tokens)
    engine.close()
    return found


def ask(engine: Engine, prompt: list[int], **options: Any) -> str:
    by_generate("llama", tuple(prompt))
    return engine.add_request(prompt, max_new_tokens=NEW, do_sample=False, **options)


def test_a_short_prompt_waits_for_no_long_one_that_only_queues() -> None:
    engine = engine_of()
    long, short = play(engine, [ask(engine, prompt) for prompt in (LONG, SHORT)])
    assert short.first_token < long.first_token
    assert (short.cached_tokens, long.cached_tokens) == (0, len(HEAD)), "what they share was computed twice"


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_short_prompt_waits_for_what_it_shares_with_a_long_one_that_is_being_computed(steps: int) -> None:
    engine = engine_of(scheduler=Shortest())
    names = [ask(engine, LONG)]
    for _ in range(steps):
        engine.step()
    names.append(ask(engine, SHORT))
    long, short = play(engine, names)
    assert short.first_token < long.first_token
    assert short.cached_tokens + long.cached_tokens == len(HEAD), "what they share was computed twice"


def test_a_short_prompt_waits_for_no_long_one_that_has_begun_and_is_passed() -> None:
    """By others that are shorter, and come in every step."""
    engine = engine_of(scheduler=Shortest())
    names = [ask(engine, stream_of_tokens(5)[:48]), ask(engine, LONG)]
    engine.step()
    names.append(ask(engine, SHORT))
    for i in range(12):
        names.append(ask(engine, [i, *stream_of_tokens(6)[:89]]))
        engine.step()
    outputs = play(engine, names)
    first, long, short, *others = (each.first_token for each in outputs)
    assert first < short < sorted(others)[1], "it has waited for one step"
    assert max(others) < long
    assert outputs[2].cached_tokens == 16, "it begins with what there is"


@pytest.mark.parametrize("max_batch_tokens", [16, 64, 2048])
def test_what_many_prompts_share_is_computed_once(max_batch_tokens: int) -> None:
    engine = engine_of(max_batch_tokens=max_batch_tokens)
    prompts = [[*HEAD, 70 + i, *stream_of_tokens(i)[: 3 * i]] for i in range(8)]
    outputs = play(engine, [ask(engine, prompt) for prompt in prompts])
    assert sorted(each.cached_tokens for each in outputs) == [0] + [len(HEAD)] * 7


def test_a_request_of_a_higher_priority_waits_for_none_of_a_lower_one() -> None:
    engine = engine_of(scheduler="fcfs")
    names = [ask(engine, LONG)]
    engine.step()
    names.append(ask(engine, SHORT, priority=1))
    long, short = play(engine, names)
    assert short.first_token < long.first_token
    assert short.cached_tokens == len(HEAD)


def test_what_a_prompt_has_computed_serves_another_one_although_it_is_preempted() -> None:
    engine = engine_of(scheduler=Shortest())
    names = [ask(engine, LONG)]
    engine.step()
    names.append(ask(engine, SHORT))
    requests = engine._requests
    with requests.lock, requests.change:
        requests.preempt(requests.named[names[0]].job)
    long, short = play(engine, names)
    assert long.preempted
    assert short.first_token < long.first_token
    assert short.cached_tokens == len(HEAD)
