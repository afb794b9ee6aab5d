"""One of two processes with half of a model's heads each, as `test_processes.py` starts them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvtier import ConfigError, ConversationStore, Engine, UnsupportedError

NEW = 6
PROMPTS = [[(5 * i * i + 3 * n + 7 * i) % 94 + 1 for i in range(8 + 5 * (n * 7 % 11))] for n in range(12)]


def divided(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()  # type: ignore[no-any-return]


def expected(folder: str) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    outs = [model.generate(row, max_new_tokens=NEW, do_sample=False)[0, row.shape[1] :].tolist() for row in rows]
    with Engine(model, host_budget="32MiB") as engine:  # processes that have a model each are as if each were alone
        out = engine.wait(engine.add_request(PROMPTS[0], max_new_tokens=NEW, do_sample=False))
        assert list(out.generated_tokens) == outs[0]
    return outs


def found(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs = engine.generate_batch(prompts, max_new_tokens=NEW, do_sample=False).values()
    return [list(each.generated_tokens) for each in outputs]


def main(folder: str) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = torch.distributed.get_rank()
    right, model = expected(folder), divided(folder)

    with Engine(model, host_budget="64MiB", block_size=4, max_batch_tokens=32) as engine:
        assert found(engine, PROMPTS) == right
        with pytest.raises(UnsupportedError, match="a thread would begin steps at another time"):
            engine.start()
        name = engine.add_request(PROMPTS[3], max_new_tokens=NEW, do_sample=False)
        assert list(engine.stream(name)) == right[3]
        if not rank:  # what it keeps is of no use to it alone
            engine._prefixes.reset()  # type: ignore[union-attr]
        assert found(engine, PROMPTS) == right
        # The end of one that is shorter, and the last token, are not seen in a next step: one has none.
        for differs in ({"max_new_tokens": NEW + rank}, {"max_new_tokens": 1, "do_sample": True, "seed": rank}):
            with pytest.raises(ConfigError, match="do not compute the same requests"):
                engine.generate_batch(PROMPTS[:2], **({"do_sample": False} | differs))
        assert found(engine, PROMPTS) == right
        mixed = PROMPTS if rank else PROMPTS[::-1]
        with pytest.raises(ConfigError, match="do not compute the same requests"):
            found(engine, mixed)

    with pytest.raises(ConfigError, match="budgets in bytes"):
        Engine(model, host_budget=f"{64 + rank}MiB", block_size=4)
    with pytest.raises(UnsupportedError, match="Leave out the directory"):
        ConversationStore(model, directory=folder)
    with closing(Engine(model, host_budget="64MiB", runner="single")) as engine:
        assert found(engine, PROMPTS[:3]) == right[:3]
    print(f"process {rank}: all tokens right", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")] == []


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    # A thread of gloo lets go of a collective's tensors after the collective counts as done. One that does so behind
    # the interpreter's end aborts the process, and did on a busy machine.
    os._exit(0)
