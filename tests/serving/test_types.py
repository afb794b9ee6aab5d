"""Every decoder-only type of Transformers in an engine: the tokens of `generate`, by the runner that the page says."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_types import tiny_model_of_type, types
from transformers import PreTrainedModel
from workloads import same_as_generate

from kvtier import Engine, UnsupportedError

NEW = 8
PROMPTS = [tuple((5 * i * i + 3 * n + 7 * i) % 94 + 1 for i in range(length)) for n, length in enumerate((11, 30, 5))]
#: Of each kind one that the tests of loads do not have; the others are slow.
ALWAYS = ("cohere2", "cpmant", "lfm2", "mamba2", "minimax", "mpt", "recurrent_gemma", "roberta")
#: How many types are run by a runner that puts requests together, at the least.
PACKED, TOGETHER = 90, 105
NEWEST = transformers.__version__.startswith("5.24.")


@functools.cache
def documented() -> dict[str, str]:
    """The runner of each type, as the page on the engine says; "refused" and "unbuilt", too."""
    page = Path(__file__).resolve().parents[2] / "docs" / "design" / "engine.md"
    rows = re.findall(r"^\| `(\w+)` \| \d+ \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: runner for runner, names in rows for name in names.split(", ")}


def model_of(name: str) -> PreTrainedModel:
    """The model, if it can be built and Transformers' own `generate` works with it."""
    try:
        model = tiny_model_of_type(name)
        generated(model, PROMPTS[1])  # longer than its windows
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}"[:100])
    return model


def generated(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[list[int], Any]:
    """Greedy tokens of `generate`, and the scores that each was chosen by."""
    row = torch.tensor([prompt])
    out = model.generate(
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=NEW,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), out.scores


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in types()]


@pytest.mark.parametrize("name", cases())
def test_every_type_gets_the_tokens_of_generate_or_is_refused(name: str) -> None:
    model = model_of(name)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    if any(x.isnan().any() for _, scores in expected for x in scores):
        pytest.skip("its random weights give no scores")
    runner = "refused"
    try:
        engine = Engine(model, host_budget="64MiB", block_size=4, max_batch_tokens=16)
    except UnsupportedError:
        pass
    else:
        runner = engine.runner
        try:
            # The last ones begin as the first do: they go on with what these have left, if anything.
            found = list(engine.generate_batch([*PROMPTS, *PROMPTS[:2]], max_new_tokens=NEW, do_sample=False).values())
        finally:
            engine.close()
        for output, (tokens, scores) in zip(found, [*expected, *expected[:2]], strict=True):
            assert output.error is None, repr(output.error)
            assert same_as_generate(output.generated_tokens, tokens, scores)
    if NEWEST:
        assert documented().get(name) == runner


@pytest.mark.skipif(not NEWEST, reason="other types")
def test_the_document_has_every_type() -> None:
    runners = documented()
    assert sorted(runners) == types()
    count = [*runners.values()].count
    assert count("packed") >= PACKED
    assert count("packed") + count("ragged") >= TOGETHER
