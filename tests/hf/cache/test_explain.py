"""`cache.explain()` says what is true of the cache, whatever state it is in."""

from __future__ import annotations

import copy
import functools
import statistics
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, FalconH1Config, LlamaConfig, MambaConfig, MistralConfig, Qwen3NextConfig

import kvtier
from kvtier import Explanation, Policy, TieredKVCache
from kvtier.config import format_size
from kvtier.cpu import build, loader
from kvtier.memory import measured
from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.names import POLICIES
from kvtier.planning.rates import Rates
from kvtier.planning.reports.log import Logged
from kvtier.planning.step import MAX_DECODE_TOKENS, LayerPlan, StepPlan, StepState
from kvtier.testing import held, with_doubles

pytestmark = pytest.mark.usefixtures("on_the_host", "one_thread")
LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_key_value_heads=HEADS)
BLOCK_BYTES = 2 * HEADS * BLOCK * DIM * 4


def decode(cache: TieredKVCache, steps: int, tokens: int = 1) -> None:
    for _ in range(steps):
        for layer in range(LAYERS):
            token = torch.randn(1, HEADS, tokens, DIM)
            keys, values = cache.update(token, token, layer)
            if tokens == 1:
                F.scaled_dot_product_attention(token, keys, values)
            elif tokens <= MAX_DECODE_TOKENS:
                mask = torch.ones(tokens, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - tokens)
                F.scaled_dot_product_attention(token, keys, values, attn_mask=mask)


def spilled(policy: str | Policy = "default", *, apart: bool = True) -> TieredKVCache:
    cache = TieredKVCache(CONFIG, device_budget="40KiB", host_budget="1MiB", block_size=BLOCK, policy=policy)
    if apart:
        with_doubles(cache, held(0))
    decode(cache, 1, 200)
    return cache


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_its_numbers_are_those_of_stats_and_residency(policy: str, apart: bool) -> None:
    cache = spilled(policy, apart=apart)
    decode(cache, 12)
    found, stats = cache.explain(), cache.stats
    assert found.condition == "spilled"
    assert (found.device, found.host, found.layers) == (stats.device, stats.host, cache.residency().layers)
    (analysis,) = found.analysis
    there = sum(x.device_blocks for x in found.layers)
    blocks = -(-cache.get_seq_length() // BLOCK) * LAYERS
    # What is fetched for the next step, and leaves again, has been spilled too.
    transient = sum(x.fetched_blocks for x in cache._forward.readers.values())
    assert analysis.spilled_blocks == blocks - there + transient > 0
    assert analysis.spilled_bytes == analysis.spilled_blocks * BLOCK_BYTES
    assert analysis.overlaps is apart
    text = str(found)
    assert kvtier.config.format_size(analysis.spilled_bytes) in text
    assert f"the {policy} policy" in text
    flat = " ".join(text.split())
    assert "do not fit" not in flat
    size = kvtier.config.format_size(analysis.spilled_bytes)
    cause = {
        "all-fetch": "part of the device is kept free for what is fetched",
        "pie": "whole layers take turns on the device",
        "neo": "whole sequences are on either side",
    }
    fetching = cause["all-fetch"] if analysis.share >= 0.005 else "the device has no room for them"
    assert f"{size} are spilled to the host ({cause.get(policy, fetching)});" in flat
    assert ("the device is emulated" in text) is not apart
    assert ("without a device_budget nothing is copied" in text.replace("\n         ", " ")) is not apart
    both = sum(x.both_blocks for x in found.layers)
    total = sum(x.device_blocks + x.host_blocks for x in found.layers)
    assert total - both == blocks, "each block is somewhere, and those on both are counted twice"
    assert (f"{both} blocks are on both" in text) == (both > 0)
    assert len(found.steps) == 11, "the last one is not over"
    cache.check_integrity()


def test_predictions_are_compared_with_their_own_steps() -> None:
    policy = POLICIES["adaptive"](0.5)
    cache = spilled(policy)
    expected: list[float | None] = []
    plan = policy.plan

    def listening(state: StepState) -> StepPlan:
        found = plan(state)
        prediction = policy.prediction(state.cache, state.device)
        expected.append(prediction.seconds if prediction is not None else None)
        return found

    policy.plan = listening  # type: ignore[method-assign]
    decode(cache, 20)
    found = cache.explain()
    assert [x for _, x in found.steps] == expected[:-1]
    assert found.predicted
    errors = [abs(x - record.seconds) / record.seconds for record, x in found.steps if x is not None]
    assert found.error == pytest.approx(statistics.median(errors))
    assert found.decision == policy.decisions(cache._forward.number)[-1]
    assert "predicted" in str(found)


def test_steps_that_verify_drafts_are_planned_and_explained() -> None:
    cache = spilled("adaptive")
    decode(cache, 12, 5)
    found = cache.explain()
    assert found.decision is not None
    assert found.predicted
    assert {record.tokens for record, _ in found.steps} == {5}
    (analysis,) = found.analysis
    assert "host" in analysis.learned
    decode(cache, 3)
    assert {record.tokens for record, _ in cache.explain().steps} == {5}, "there were more of these"
    decode(cache, 30)
    assert {record.tokens for record, _ in cache.explain().steps} == {1}


def test_rates_are_estimates_until_steps_have_shown_them() -> None:
    cache = spilled("adaptive", apart=False)
    decode(cache, 1)
    cache.close()
    apart = spilled("adaptive")
    decode(apart, 2)
    assert "estimates, not measured" in str(apart.explain())
    decode(apart, 10)
    (analysis,) = apart.explain().analysis
    assert "host" in analysis.learned
    assert "seen in steps: attention on the host" in str(apart.explain())
    assert not analysis.rates.measured


def test_rates_that_were_measured_are_used_under_the_default_policy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_rates = replace(Rates(), up=7e9, measured=True)
    monkeypatch.setattr(measured, "rates", lambda device, layout: measured_rates)
    cache = spilled("default")
    decode(cache, 4)
    (analysis,) = cache.explain().analysis
    assert analysis.rates.up == 7e9
    assert "estimates, not measured" not in str(cache.explain())


def test_a_cache_that_is_unused_closed_or_of_one_tier_says_so() -> None:
    unused = TieredKVCache(CONFIG, device_budget="1GiB")
    assert unused.explain().condition == "unused"
    assert "no tokens yet" in str(unused.explain())
    assert "1 GiB" in str(unused.explain())
    assert TieredKVCache().explain().condition == "unused"
    one = TieredKVCache(CONFIG)
    decode(one, 3)
    assert one.explain().condition == "one tier"
    assert "no device tier" in str(one.explain())
    one.close()
    assert one.explain().condition == "closed"
    assert "closed" in str(one.explain())


def test_where_everything_fits_there_is_nothing_to_decide() -> None:
    cache = TieredKVCache(CONFIG, device_budget="1MiB", host_budget="1MiB", policy="adaptive")
    decode(cache, 5)
    found = cache.explain()
    assert found.condition == "resident"
    assert found.binding is None
    assert "every block is on the device" in str(found)


def test_after_a_reset_it_knows_nothing_of_what_was() -> None:
    cache = spilled("adaptive")
    decode(cache, 5)
    assert cache.explain().steps
    cache.reset()
    assert (cache.explain().condition, cache.explain().steps) == ("unused", ())


def test_a_recurrent_model_has_used_its_cache_though_no_layer_counts_tokens() -> None:
    cache = TieredKVCache(MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4))
    assert cache.explain().condition == "unused"
    cache.update_conv_state(torch.randn(1, 64, 4), 0)
    assert cache.explain().condition == "one tier"
    assert "no layer is tiered: windows and recurrent states are bounded" in str(cache.explain())
    cache.reset()
    assert cache.explain().condition == "unused"


def test_a_cache_of_windows_alone_is_not_empty_once_it_has_tokens() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": HEADS}
    cache = TieredKVCache(MistralConfig(sliding_window=8, **sizes))
    assert repr(cache) == "TieredKVCache(2 layers, empty)"
    cache.update(torch.randn(1, HEADS, 5, DIM), torch.randn(1, HEADS, 5, DIM), 0)
    held = format_size(2 * HEADS * 5 * DIM * 4)
    assert repr(cache) == f"TieredKVCache(2 layers, 0 tiered, {held} in layers that are not)"


def test_layers_that_are_not_tiered_are_counted_apart() -> None:
    config = Qwen3NextConfig(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=HEADS)
    cache = TieredKVCache(config, device_budget="1MiB", host_budget="1MiB")
    tiered = next(i for i, x in enumerate(cache.residency().layers) if x.kind == "tiered")
    cache.update(torch.randn(1, HEADS, 5, DIM), torch.randn(1, HEADS, 5, DIM), tiered)
    text = str(cache.explain())
    assert f"layer {tiered}: 5 tokens" in text
    assert "layers 0-2: 0 tokens, in" in text


class Silent(Policy):
    """A newcomer's policy: nothing but a plan."""

    def plan(self, state: StepState) -> StepPlan:
        return super().plan(state)


def test_a_policy_that_says_nothing_is_explained_by_what_steps_took() -> None:
    cache = spilled(Silent())
    decode(cache, 12)
    found = cache.explain()
    assert isinstance(found, Explanation)
    assert (found.decision, found.predicted) == (None, None)
    (analysis,) = found.analysis
    assert analysis.predicted == pytest.approx(found.seen, rel=0.5)
    assert "the policy predicts nothing" in str(found)
    assert found.policy == "Silent", "a class of one's own has no other name"


def test_several_caches_of_one_memory_are_explained_apart() -> None:
    memory = kvtier.TieredMemory(device_budget="80KiB", host_budget="2MiB", policy="adaptive")
    memory.set_up(held(0))
    caches = [TieredKVCache(CONFIG, memory=memory, block_size=BLOCK) for _ in range(2)]
    for cache in caches:
        decode(cache, 1, 200)
    decode(caches[0], 6)
    one, two = (cache.explain() for cache in caches)
    assert one.steps
    assert not two.steps
    assert one.device == two.device, "the memory is one"


def test_asking_in_the_middle_of_a_forward_changes_nothing() -> None:
    cache = spilled("all-fetch")
    decode(cache, 3)
    token = torch.randn(1, HEADS, 1, DIM)
    view, _ = cache.update(token, token, 0)
    before = cache.stats
    str(cache.explain())
    assert cache.stats == before
    F.scaled_dot_product_attention(token, view, view)
    cache.crop(0)
    cache.check_integrity()


class Alone(Adaptive):
    """Fails where it is called while another thread could call it too."""

    memory: kvtier.TieredMemory
    asked: set[str]

    def _check(self, name: str) -> None:
        assert self.memory.lock._is_owned(), f"{name}: another cache may be planning"
        self.asked.add(name)

    def decisions(self, cache: int, device: str | None = None) -> list[Decision]:
        self._check("decisions")
        return super().decisions(cache, device)

    def model(self, cache: int, device: str | None = None) -> CostModel | None:
        self._check("model")
        return super().model(cache, device)

    def prediction(self, cache: int, device: str) -> Prediction | None:
        self._check("prediction")
        return super().prediction(cache, device)


def test_a_policy_is_asked_while_no_other_cache_plans_with_it() -> None:
    policy = Alone()
    policy.memory, policy.asked = kvtier.TieredMemory(device_budget="40KiB", host_budget="1MiB", policy=policy), set()
    cache = TieredKVCache(CONFIG, memory=with_doubles(policy.memory, held(0)), block_size=BLOCK)
    decode(cache, 1, 200)
    decode(cache, 3)
    policy.asked.clear()
    assert cache.explain().condition == "spilled"
    assert policy.asked == {"decisions", "model", "prediction"}


def test_a_policy_that_is_logged_is_explained_as_without_the_log(tmp_path: Path) -> None:
    cache = spilled(Logged(POLICIES["adaptive"](0.5), tmp_path / "log"))
    decode(cache, 12)
    found = cache.explain()
    assert found.policy == "adaptive"
    assert found.decision is not None
    assert found.predicted
    assert "host" in found.analysis[0].learned


def hybrid() -> FalconH1Config:
    sizes = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50)
    return FalconH1Config(
        **sizes, num_key_value_heads=2, mamba_d_ssm=None, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8
    )


def test_kv_next_to_a_state_is_told_from_what_is_bounded() -> None:
    config = hybrid()
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.warns(RuntimeWarning, match="2 of 2 keep KV next to something else"):
        cache = TieredKVCache(config)
    kinds = cache.residency().layers
    assert [(x.kind, x.grows) for x in kinds] == [("LinearAttentionAndFullAttentionLayer", True)] * 2
    bytes_of = []
    for tokens in (5, 5):
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
        bytes_of.append(cache.explain().resident_bytes)
    assert bytes_of[1] - bytes_of[0] == 2 * 5 * 2 * 2 * 8 * 4, "it grows with each token"
    text = " ".join(str(cache.explain()).split())
    assert "no layer is tiered: what they keep stays with the model, outside every budget" in text
    assert "not tiered, and it grows with the context" in text
    assert "bounded" not in text


def test_what_is_bounded_is_still_called_so() -> None:
    config = Qwen3NextConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        layer_types=["linear_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = TieredKVCache(config)
        used = TieredKVCache(CONFIG)
        decode(used, 1)
    assert not any(x.grows for x in cache.residency().layers)
    with pytest.warns(RuntimeWarning, match="was closed"):
        cache.close()


def test_the_warning_is_of_the_callers_line_and_shown_once_there() -> None:
    config = hybrid()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            copy.deepcopy(TieredKVCache(config))
    ours = [x for x in told if "No layer of this model" in str(x.message)]
    assert [Path(x.filename).name for x in ours] == [Path(__file__).name]


def test_fetching_all_leaves_to_the_host_what_there_is_no_room_for() -> None:
    """As the plan of a device that is far too small has it."""
    cache = TieredKVCache(
        CONFIG, device_budget=8 * BLOCK_BYTES, host_budget="1MiB", block_size=BLOCK, policy="all-fetch"
    )
    decode(cache, 120)
    last, _ = cache.explain().steps[-1]
    assert last.host_bytes > last.bytes_up > 0


def test_what_the_device_would_have_room_for_is_not_said_to_lack_it() -> None:
    class LeavesRoom(Policy):
        """Brings nothing back."""

        def plan(self, state: StepState) -> StepPlan:
            return StepPlan([LayerPlan() for _ in state.layers])

    cache = spilled(LeavesRoom())
    decode(cache, 2)
    assert "(the device has no room for them);" in " ".join(str(cache.explain()).split())
    cache.crop(-120)
    decode(cache, 2)
    found = cache.explain()
    free = found.device.budget - (found.device.used_blocks * BLOCK_BYTES)
    assert 0 < found.analysis[0].spilled_bytes < free
    assert "are spilled to the host; " in " ".join(str(found).split())


@pytest.mark.parametrize("device_budget", [None, "40KiB"])
@pytest.mark.filterwarnings("ignore:kvtier's native kernel")
def test_that_the_native_kernel_is_missing_is_said_with_what_to_do(
    device_budget: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "_load", functools.cache(loader._load.__wrapped__))
    monkeypatch.setattr(build, "TARGET", tmp_path / "missing.so")
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    cache = TieredKVCache(CONFIG, device_budget=device_budget, host_budget="1MiB", block_size=BLOCK)
    assert "native kernel" not in f"{cache.explain()} {cache.stats}"
    decode(cache, 1, 200)
    decode(cache, 3)
    for text in (str(cache.explain()), cache.stats.summary()):
        flat = " ".join(text.split())
        assert "native kernel" in flat
        assert "not compiled. `python -m kvtier.cpu.build` compiles it" in flat
    assert len([line for line in str(cache.explain()).splitlines() if line.startswith("if ")]) == 1
