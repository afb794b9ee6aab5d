"""What is told while a cache works: plans and long prompts in the log, layers of a long prompt to a hook."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from typing import Any

import pytest
from families import prompt_ids, tiny_model

import kvtier
from kvtier import ConfigError, InterruptedStepError, Progress, TieredKVCache
from kvtier.forward import appending, planned

LONG = 30


@pytest.fixture(autouse=True)
def _long_prompts_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (appending, planned):
        monkeypatch.setattr(module, "LONG_PROMPT", LONG)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.name == "kvtier.forward" and x.levelno == level]


def run(cache: Any, length: int = LONG, **options: Any) -> None:
    model = tiny_model("llama")
    model.generate(prompt_ids(length=length), past_key_values=cache, max_new_tokens=5, do_sample=False, **options)


def test_a_long_prompt_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    with TieredKVCache(tiny_model("llama").config, host_budget="1MiB") as cache:
        run(cache, LONG - 1)
        assert lines(caplog, logging.INFO) == []
    with TieredKVCache(tiny_model("llama").config, host_budget="1MiB") as cache:
        run(cache, 2 * LONG, prefill_chunk_size=LONG)
        told = lines(caplog, logging.INFO)
        assert len(told) == 2
        assert f": {LONG} tokens behind 0, " in told[0]
        assert f": {LONG} tokens behind {LONG}, " in told[1]
        assert " of 1 MiB" in told[1]
    assert len(lines(caplog, logging.INFO)) == 2
    with TieredKVCache(tiny_model("llama").config) as cache:
        tiny_model("llama")(prompt_ids(length=LONG), past_key_values=cache)
    assert "until the end" in lines(caplog, logging.INFO)[2]


def test_a_long_prompt_of_a_model_that_begins_with_a_recurrent_layer_is_told_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvtier")
    model = tiny_model("qwen3_next")
    with TieredKVCache(model.config) as cache:
        model.generate(prompt_ids(length=LONG), past_key_values=cache, max_new_tokens=3, do_sample=False)
    told = lines(caplog, logging.INFO)
    assert len(told) == 1
    assert f"{LONG} tokens behind 0" in told[0]


def test_plans_are_in_the_log_once_for_each_step_with_spilled_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    with TieredKVCache(tiny_model("llama").config, host_budget="1MiB") as cache:
        run(cache, 60)
    assert lines(caplog, logging.DEBUG) == [], "one tier: there is nothing to plan"
    with TieredKVCache(tiny_model("llama").config, device_budget="80KiB", block_size=4, policy="all-fetch") as cache:
        run(cache, 80)
        told, steps = lines(caplog, logging.DEBUG), cache.stats.steps
    assert 2 <= len(told) <= steps
    assert "1 new tokens: policy " in told[-1]
    assert "fetch_blocks" in told[-1]


def test_a_plan_that_is_made_again_within_a_prompt_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    with TieredKVCache(tiny_model("llama").config, device_budget="20KiB", host_budget="1MiB", block_size=4) as cache:
        run(cache, 90)
    told, number = [x.split(" new tokens")[0] for x in lines(caplog, logging.DEBUG)], cache._forward.number
    assert f"cache {number}, step 1 on cpu, 90" in told
    assert len(told) == len(set(told))


def test_calls_within_tiered_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvtier")
    with kvtier.tiered(tiny_model("llama")):
        run(None)
        run(None, use_cache=False)
    told = [x.getMessage() for x in caplog.records if x.name == "kvtier.tiered"]
    assert "has ended: 5 forwards" in told[0]
    assert "is left: use_cache=False" in told[1]


def test_a_hook_hears_of_each_layer_of_a_long_prompt_and_of_no_other_forward() -> None:
    heard: list[Progress] = []
    with TieredKVCache(tiny_model("llama").config, progress=heard.append) as cache:
        run(cache, 2 * LONG + 3, prefill_chunk_size=LONG)
    assert [(x.tokens, x.past, x.layer, x.layers) for x in heard] == [
        (LONG, past, layer, 3) for past in (0, LONG) for layer in (1, 2, 3)
    ]
    seconds = [x.seconds for x in heard]
    assert sorted(seconds[:3]) == seconds[:3]
    heard.clear()
    with TieredKVCache(progress=heard.append) as cache:  # nobody knows how many layers come
        run(cache, LONG)
    assert [(x.layer, x.layers) for x in heard] == [(1, 0), (2, 0), (3, 0)]
    heard.clear()
    with kvtier.tiered(tiny_model("gemma3"), progress=heard.append):
        tiny_model("gemma3").generate(prompt_ids(length=LONG), max_new_tokens=2)
    assert [(x.layer, x.layers) for x in heard] == [(1, 2), (2, 2)], "of layers that are tiered"


def test_a_hook_that_raises_ends_the_forward_and_the_cache_goes_on_behind_it() -> None:
    class Stop(Exception):
        pass

    def stop(at: Progress) -> None:
        if at.layer == 2:
            raise Stop

    with TieredKVCache(tiny_model("llama").config, progress=stop) as cache:
        run(cache, LONG - 6)
        before = cache.get_seq_length()
        more = prompt_ids(length=LONG, seed=3)
        with pytest.raises(Stop):
            tiny_model("llama")(more, past_key_values=cache)
        with pytest.raises(InterruptedStepError):
            tiny_model("llama")(more[:, :2], past_key_values=cache)
        cache.crop(0)
        assert cache.get_seq_length() == before
        tiny_model("llama")(more[:, :2], past_key_values=cache)
        cache.check_integrity()


def test_a_hook_may_look_at_the_cache() -> None:
    seen = []
    cache = TieredKVCache(tiny_model("llama").config, progress=lambda at: seen.append((cache.stats, repr(cache))))
    run(cache)
    assert len(seen) == 3
    copied = pickle.loads(pickle.dumps(cache))
    seen.clear()
    tiny_model("llama")(prompt_ids(length=LONG), past_key_values=copied)
    assert seen == []
    cache.close()


def test_a_cache_with_a_hook_gives_its_memory_back_as_soon_as_it_is_dropped() -> None:
    with kvtier.TieredMemory(host_budget="1MiB") as memory:
        cache = TieredKVCache(tiny_model("llama").config, memory=memory, progress=lambda at: None)
        run(cache)
        gc.disable()
        try:
            del cache
            assert memory.stats.host.used_blocks == 0
        finally:
            gc.enable()


def test_what_cannot_be_called_is_no_hook() -> None:
    with pytest.raises(ConfigError, match="progress"):
        TieredKVCache(progress=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="progress"):
        kvtier.tiered(tiny_model("llama"), progress="bar")  # type: ignore[arg-type]


def test_nothing_is_locked_while_the_log_is_told() -> None:
    """A handler may print the cache, also while other threads work with it."""
    said: list[str] = []
    model = tiny_model("llama")
    asked: list[Any] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(
                target=lambda: said.append(f"{record.getMessage()} {asked[0].stats}"), daemon=True
            )
            thread.start()
            thread.join(120)
            assert not thread.is_alive(), "it waits for a lock"

    logger, handler = logging.getLogger("kvtier"), Asking()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with kvtier.tiered(model, device_budget="80KiB", block_size=4, policy="all-fetch") as used:
            asked[:] = [used]
            model.generate(prompt_ids(length=80), max_new_tokens=4)
        with TieredKVCache(model.config, device_budget="80KiB", block_size=4, policy="all-fetch") as cache:
            asked[:] = [cache]
            run(cache, 80)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert any("new tokens: policy" in x for x in said)
    assert any("has ended" in x for x in said)
    assert any("80 tokens behind 0" in x for x in said)
