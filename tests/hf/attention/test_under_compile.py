"""Under `torch.compile` and in CUDA graphs: a cache whose blocks move is no part of what is compiled or captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build_model, prompt_ids, tiny_model
from placements import tiered_cache

from kvtier import UnsupportedError
from kvtier.hf.attention import dynamo
from kvtier.kernels import launch


def of_kvtier(graph: torch.fx.GraphModule) -> bool:
    """Whether anything in a graph stems from kvtier's own code."""
    return any("/kvtier/" in (node.meta.get("stack_trace") or "") for node in graph.graph.nodes)


@pytest.mark.parametrize("host_attention", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_model_gets_the_right_tokens_and_dynamo_leaves_the_cache_alone(host_attention: bool) -> None:
    model = build_model("llama", "sdpa")
    prompt = prompt_ids()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    cache = tiered_cache(model, 50_000, host_attention=host_attention)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    try:
        model.forward = torch.compile(model.forward, backend=backend)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)
    finally:
        torch._dynamo.reset()
    assert graphs
    assert not any(map(of_kvtier, graphs))
    assert cache.stats.evictions > 0
    cache.check_integrity()


def test_a_torch_that_cannot_be_told_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.trace_rules, "add", None)
    with pytest.warns(RuntimeWarning, match="do not compile"):
        dynamo.keep_out.__wrapped__()


def test_a_captured_graph_is_refused_where_a_recurrent_layer_begins_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_next")
    cache = tiered_cache(model)
    tokens = prompt_ids(rows=1, length=10)
    monkeypatch.setattr(launch, "captured", lambda x: True)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="CUDA graph"):
        model(tokens, past_key_values=cache)


def test_a_step_in_a_captured_graph_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama", "sdpa")
    cache = tiered_cache(model)
    tokens = prompt_ids(rows=1, length=10)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "captured", lambda x: True)
            with pytest.raises(UnsupportedError, match="CUDA graph"):
                model(tokens[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 10
        cache.check_integrity()
        model(tokens[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 11
