"""An engine that is not made, since an interrupt ends its trial: the model and the memory are as they were before."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cut_short import interrupted
from families import build_model
from transformers import PreTrainedModel
from workloads import MODELS

import kvtier
from kvtier import Engine, TieredMemory

#: Lines of the making of an engine at which an interrupt comes; KVTIER_TEST_LINES asks for more.
LINES = int(os.environ.get("KVTIER_TEST_LINES", "40"))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
#: Of a number of lines that no call has.
MANY = 1 << 40


def model_of(name: str) -> PreTrainedModel:
    family, attention, settings, _ = MODELS[name]
    return build_model(family, attention, **settings)


def attention_of(model: PreTrainedModel) -> set[str | None]:
    return {getattr(x.config, "_attn_implementation", None) for x in model.modules() if hasattr(x, "config")}


@contextmanager
def interrupts(model: PreTrainedModel, at: int) -> Iterator[list[int]]:
    """The forward of this number ends with an interrupt. The forwards, in a list of their numbers."""
    count = list[int]()

    def began(*args: Any) -> None:
        count.append(len(count))
        if count[-1] == at:
            raise KeyboardInterrupt

    with model.register_forward_pre_hook(began):
        yield count


def check_free(model: PreTrainedModel, memory: TieredMemory, before: set[str | None]) -> None:
    assert attention_of(model) == before
    kvtier.disable(model)  # nobody has it
    assert not memory.owners
    assert memory.stats.host.used_blocks == 0


@pytest.mark.parametrize("name", ["llama", "falcon", "jamba"])
def test_whichever_forward_of_a_trial_is_interrupted_leaves_nothing_whoever_keeps_the_traceback(name: str) -> None:
    """As an interactive Python keeps the last one."""
    model, kept = model_of(name), list[KeyboardInterrupt]()
    before = attention_of(model)
    with TieredMemory(host_budget="8MiB") as memory:
        with interrupts(model, MANY) as all_of_them:
            Engine(model, memory=memory, block_size=4).close()
        assert len(all_of_them) > 5
        for at in all_of_them:
            with interrupts(model, at), pytest.raises(KeyboardInterrupt) as caught:
                Engine(model, memory=memory, block_size=4)
            kept.append(caught.value)
            check_free(model, memory, before)


@pytest.mark.parametrize("part", ["", "serving/runners/choice.py", "serving/engine.py", "forward/packed.py"])
def test_at_whichever_line_of_its_making_an_interrupt_comes_nothing_is_left_of_an_engine(part: str) -> None:
    model, engines = model_of("llama"), list[Engine]()
    before = attention_of(model)

    def interrupted_at(at: int) -> int:
        with TieredMemory(host_budget="8MiB") as memory:  # which is closed: nobody uses it
            left = interrupted(lambda: engines.append(Engine(model, memory=memory, block_size=4)), at, part)
            # Whoever interrupts it may not get an engine of another kind instead.
            assert not engines or engines[0].runner == "packed"
            while engines:  # there are fewer lines than that
                engines.pop().close()
            gc.collect()
            assert attention_of(model) == before
            kvtier.disable(model)  # nobody has it
            assert memory.stats.host.used_blocks == 0
        return left

    interrupted_at(MANY)  # what is read or compiled once
    lines = MANY - interrupted_at(MANY)
    assert lines > 20
    chosen = random.Random(lines).sample(range(1, lines), min(LINES, lines - 1))
    # The last ones are those in which it is handed over.
    for at in sorted({*chosen, *range(lines - 20, lines)}):
        interrupted_at(at)
    with Engine(model, host_budget="8MiB", block_size=4) as engine:
        assert len(engine.generate_batch([PROMPT], max_new_tokens=4, do_sample=False)) == 1
