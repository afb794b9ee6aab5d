"""Models that keep positions from one call to the next (multimodal rotary embeddings), in an engine that is made behind
such a call, or runs while others call the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from kvtier import Engine, TieredMemory
from kvtier.config import CacheOptions
from kvtier.serving.runners.runner import Work
from kvtier.serving.runners.single import SingleRunner

IMAGE, START, END, NEW = 90, 88, 89, 8
PROMPTS = [tuple((5 * i * i + 3 * n + 7 * i) % 80 + 1 for i in range(length)) for n, length in enumerate((11, 30, 5))]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def multimodal() -> PreTrainedModel:
    """A tiny Qwen2-VL. An image of 4 x 4 patches is 4 tokens, and takes 2 positions."""
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen2VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=1.5 * module.weight.shape[1] ** -0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def generated(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, len(prompt) :].tolist()


def generate_from_rows(model: PreTrainedModel) -> None:
    model.generate(torch.tensor([PROMPTS[0]] * 2), **GREEDY)


def generate_from_image(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, START, *[IMAGE] * 4, END, 7]])
    model.generate(
        ids,
        pixel_values=torch.randn(16, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(1)),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        mm_token_type_ids=(ids == IMAGE).long(),
        **GREEDY,
    )
    assert model.model.rope_deltas.tolist() == [[-2]]


@pytest.mark.parametrize("before", [generate_from_rows, generate_from_image])
def test_an_engine_is_what_it_is_whatever_was_generated_before(before: Any) -> None:
    model = multimodal()
    expected = [generated(model, prompt) for prompt in PROMPTS]
    before(model)
    with Engine(model, host_budget="64MiB", block_size=4, max_batch_tokens=16) as engine:
        assert engine.runner == "packed"
        found = list(engine.generate_batch(PROMPTS, **GREEDY).values())
    assert [output.generated_tokens for output in found] == expected


@pytest.mark.parametrize("between", [generate_from_rows, generate_from_image])
def test_a_sequence_alone_goes_on_from_its_own_positions(between: Any) -> None:
    model = multimodal()
    prompt, expected = PROMPTS[0], generated(model, PROMPTS[0])
    ids = list(prompt)
    with TieredMemory(host_budget="64MiB") as memory:
        runner = SingleRunner(model, memory, CacheOptions.parse(4, True))
        sequence = runner.add()
        for _ in range(NEW):
            done = runner.cached(sequence)
            (scores,) = runner.step([Work(sequence, ids, done, len(ids) - done, True)])
            assert scores is not None
            ids = [*ids, int(scores.argmax())]
            between(model)
        runner.close()
    assert ids[len(prompt) :] == expected
