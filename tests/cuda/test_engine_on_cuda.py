"""An engine on a real device runs what it can together, and gives the tokens of `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvtier import Engine

pytestmark = pytest.mark.cuda

#: Settings whose processors keep tensors, which meet the scores on the device.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "min_new_tokens": {"min_new_tokens": 8},
    "min_length": {"min_length": 20},
    "suppress_tokens": {"suppress_tokens": [3, 5, 7]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [3, 5, 7]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [5, 7]]},
    "sequence_bias": {"sequence_bias": [[[3], 2.0]]},
}


@pytest.mark.parametrize("budget", ["64MiB", "2MB"], ids=["resident", "spilled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_packed_requests_get_the_tokens_of_generate(
    name: str, budget: str, llama: Any, prompts: list[list[int]]
) -> None:
    options = {"max_new_tokens": 16, "do_sample": False, **SETTINGS[name]}
    with Engine(llama, device_budget=budget, host_budget="64MiB", block_size=16) as engine:
        assert engine.runner == "packed"
        outputs = engine.generate_batch(prompts, **options)
        found = [output.generated_tokens for output in outputs.values()]
        assert [output.error for output in outputs.values()] == [None] * len(found)
    for prompt, tokens in zip(prompts, found, strict=True):
        alone = llama.generate(torch.tensor([prompt], device="cuda"), **options)
        assert tokens == alone[0, len(prompt) :].tolist()


def test_what_a_seed_draws_does_not_depend_on_the_batch(llama: Any, prompts: list[list[int]]) -> None:
    options = {"max_new_tokens": 16, "do_sample": True, "seed": 3}
    with Engine(llama, device_budget="64MiB", host_budget="64MiB", block_size=16) as engine:
        together = [x.generated_tokens for x in engine.generate_batch(prompts, **options).values()]
        alone = [next(iter(engine.generate_batch([x], **options).values())).generated_tokens for x in prompts]
    assert together == alone


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_that_is_not_on_the_current_device_gets_the_tokens_of_generate(
    llama: Any, prompts: list[list[int]]
) -> None:
    model = copy.deepcopy(llama).to("cuda:1")
    options = {"max_new_tokens": 16, "do_sample": False}
    with Engine(model, device_budget="2MB", host_budget="64MiB", block_size=16) as engine:
        found = [x.generated_tokens for x in engine.generate_batch(prompts, **options).values()]
    assert torch.cuda.current_device() == 0
    for prompt, tokens in zip(prompts, found, strict=True):
        alone = model.generate(torch.tensor([prompt], device="cuda:1"), **options)
        assert tokens == alone[0, len(prompt) :].tolist()


def test_a_criterion_meets_its_tensors_on_the_device(llama: Any, prompts: list[list[int]]) -> None:
    ends = torch.arange(0, 4096, 2, device="cuda")

    def even(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(ids[:, -1], ends)

    options = {"max_new_tokens": 16, "do_sample": False, "stopping_criteria": [even]}
    with Engine(llama, device_budget="64MiB", host_budget="64MiB", block_size=16) as engine:
        outputs = engine.generate_batch(prompts, **options)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        alone = llama.generate(torch.tensor([prompt], device="cuda"), **options)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()
