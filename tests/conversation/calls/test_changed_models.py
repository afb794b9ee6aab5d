"""What is kept is of one model as it is: whoever changes it, in whatever way, gets no token from before."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import VOCAB, attentions, build_model, tiny_model
from test_store import GREEDY, fresh, ones, some_ids, store_of
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.testing._internal.two_tensor import TwoTensor
from transformers import BartConfig, BartForConditionalGeneration, Gemma3ForCausalLM, Gemma3TextConfig

from kvtier import ConfigError, ConversationStore, Engine, KVTierError, TieredKVCache, UnsupportedError
from kvtier.conversation.calls import prefix_reuse
from kvtier.conversation.journal import JournalledCache
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.identity.fingerprint import fingerprint
from kvtier.hf.models.identity.written import numbers

FUSED = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


def step(optimizer: torch.optim.Optimizer) -> None:
    """A step that writes every weight."""
    for group in optimizer.param_groups:
        for x in group["params"]:
            x.grad = torch.ones_like(x)
    optimizer.step()
    optimizer.zero_grad()


def tell(store: ConversationStore, model: Any, ids: torch.Tensor) -> int:
    """The tokens that a call begins with, whose answer is that of a new cache."""
    assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
    return store.reuse[0].cached


# Weights


@pytest.mark.parametrize("kind", FUSED)
def test_a_step_of_a_fused_optimizer_is_noticed_though_torch_counts_no_write(kind: Any) -> None:
    model, ids = copy.deepcopy(tiny_model("llama")).eval(), some_ids(40)
    optimizer = kind(model.parameters(), lr=0.05, fused=True)
    with store_of(model) as store:
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        before = [x._version for x in model.parameters()]
        step(optimizer)
        assert before == [x._version for x in model.parameters()], "torch counts these now"
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]


def test_weights_that_share_their_storage_with_those_of_an_optimizer_are_noticed() -> None:
    trained, ids = copy.deepcopy(tiny_model("llama")).eval(), some_ids(40)
    model = copy.deepcopy(trained).eval()
    model.load_state_dict(trained.state_dict(), assign=True)
    with store_of(model) as store:
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        step(torch.optim.AdamW(trained.parameters(), lr=0.05, fused=True))
        assert tell(store, model, ids) == 0


def test_another_model_that_is_trained_costs_nothing_that_is_kept() -> None:
    model, ids = tiny_model("llama"), some_ids(40)
    optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=0.05, fused=True)
    with store_of(model) as store:
        tell(store, model, ids)
        for _ in range(3):
            step(optimizer)
            assert tell(store, model, ids) == 39


def test_steps_are_heard_of_once_in_a_process_and_no_tensor_is_kept_alive() -> None:
    model = build_model("llama", "sdpa")
    dependence.weights_version(model)
    gc.collect()  # models of other tests are gone, so that only `other` comes and goes
    hooks, known = len(_global_optimizer_post_hooks), len(numbers._known)
    other = build_model("llama", "sdpa")
    for each in (model, other):
        store_of(each).close()
    assert len(_global_optimizer_post_hooks) == hooks
    assert len(numbers._known) > known
    weight = weakref.ref(other.model.embed_tokens.weight)
    del other, each
    gc.collect()
    assert weight() is None
    assert len(numbers._known) == known


def test_a_weight_at_the_address_and_with_the_version_of_the_one_before_is_another_one() -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    layer = model.model.layers[0].self_attn.k_proj
    storage = torch.zeros(layer.weight.numel())

    def load(seed: int) -> None:
        layer.weight = None
        values = torch.randn(storage.shape, generator=torch.Generator().manual_seed(seed))
        storage.data.copy_(values)  # as an allocator gives the same memory again
        layer.weight = torch.nn.Parameter(storage.data.view(layer.out_features, layer.in_features), requires_grad=False)

    load(0)
    was = layer.weight.data_ptr(), layer.weight._version
    with store_of(model) as store:
        assert tell(store, model, ids) == 0
        for seed in (1, 2):
            load(seed)
            assert was == (layer.weight.data_ptr(), layer.weight._version)
            assert tell(store, model, ids) == 0
        assert tell(store, model, ids) == 39


def test_weights_can_be_swapped_and_those_that_come_are_others() -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    weight = model.model.layers[0].self_attn.k_proj.weight
    other = torch.nn.Parameter(weight.detach() * -2, requires_grad=weight.requires_grad)
    with store_of(model) as store:
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        for _ in range(2):  # as PEFT gives an adapter other weights, and `Module.to` quantised ones another device
            torch.utils.swap_tensors(weight, other)
            assert [tell(store, model, ids) for _ in range(2)] == [0, 39]


def test_copies_and_pickles_of_tensors_with_numbers_are_those_of_others() -> None:
    for kind in (torch.nn.Parameter, torch.nn.Buffer):
        x, file = kind(torch.ones(2)), io.BytesIO()
        x.of_a_user = ["says"]
        number = numbers.of(x)
        torch.save(x, file)
        made = [copy.copy(x), copy.deepcopy(x), torch.load(io.BytesIO(file.getvalue()), weights_only=True)]
        assert all(type(vars(each)) is dict for each in made)
        assert all(each.of_a_user == ["says"] for each in (x, made[0], made[2])), "torch copies these"
        assert b"kvtier" not in file.getvalue()
        assert numbers.of(x) == number not in map(numbers.of, made)


def test_a_tensor_at_the_id_of_one_whose_attributes_somebody_holds_is_another_one() -> None:
    x = torch.ones(2)
    number, held = numbers.of(x), vars(x)
    x.__dict__ = {}  # as of a tensor that is made where that one has ended
    now = numbers.of(x)
    assert now != number
    del held
    assert numbers.of(x) == now, "what ended later has taken the number of another one away"


def test_weights_that_another_call_finds_changed_are_not_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    with store_of(model) as store:
        keep, done = store._kept.keep, list[int]()

        def slow(*args: Any, **options: Any) -> Any:
            if not done:  # between the comparison of weights and the end of the call
                done.append(1)
                with torch.no_grad():
                    model.get_parameter("model.layers.0.self_attn.k_proj.weight").mul_(-2)
                other = threading.Thread(target=lambda: store.generate(**ones(some_ids(9, seed=5)), **GREEDY))
                other.start()
                other.join()
            return keep(*args, **options)

        monkeypatch.setattr(store._kept, "keep", slow)
        store.generate(**ones(ids), **GREEDY)
        assert store.stats.sequences == 1, "that of the other thread"
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        store.check_integrity()


def test_what_an_encoder_gave_before_another_call_found_other_weights_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=1, encoder_layers=1, decoder_attention_heads=4,
        encoder_attention_heads=4, decoder_ffn_dim=32, encoder_ffn_dim=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    with store_of(model) as store:
        depends, looks = dependence.depends, list[int]()

        def slow(model: Any) -> Any:
            found = depends(model)
            looks.append(1)
            if len(looks) == 2:
                store.clear()
            return found

        monkeypatch.setattr(dependence, "depends", slow)
        for cached in (0, 0, 20):
            store.generate(**ones(some_ids(20)), **GREEDY)
            assert store.reuse[0].cached == cached


def test_what_is_loaded_while_all_is_dropped_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        load = store._disk_tier._archive.load

        def slow(*args: Any, **options: Any) -> Any:
            found = load(*args, **options)
            store.clear()
            return found

        monkeypatch.setattr(store._disk_tier._archive, "load", slow)
        assert store._disk_tier.load(((None,), None), b"", stateful=False) == (0, "")
        assert tell(store, model, ids) == 0
        store.check_integrity()


def test_a_folder_is_bound_to_buffers_that_are_not_saved_with_the_model(tmp_path: Path) -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    with store_of(model, directory=tmp_path) as store:
        tell(store, model, ids)
    with store_of(build_model("llama", "sdpa"), directory=tmp_path) as store:
        assert tell(store, model, ids) == 39
    model.model.rotary_emb.inv_freq.mul_(1 + 2**-23)  # as another device may compute them
    with store_of(model, directory=tmp_path) as store:
        assert tell(store, model, ids) == 39
    model.model.rotary_emb.inv_freq.mul_(0.25)
    with pytest.raises(ConfigError, match="another weights"):
        store_of(model, directory=tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch announces the successor of this function
def test_a_folder_is_bound_to_weights_that_are_packed_with_their_bias(tmp_path: Path) -> None:
    def quantised(seed: int) -> Any:
        small: Any = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            build_model("llama", "sdpa", seed=seed), {torch.nn.Linear}, dtype=torch.qint8
        )
        return small.eval()

    model, ids = quantised(1), some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        tell(store, model, ids)
    with store_of(quantised(1), directory=tmp_path) as store:
        assert tell(store, model, ids) == 39
    other = quantised(2)
    other.set_input_embeddings(model.get_input_embeddings())  # so that what is packed alone differs
    with pytest.raises(ConfigError, match="another weights"):
        store_of(other, directory=tmp_path)


def test_weights_that_are_made_of_other_tensors_are_part_of_what_a_model_is() -> None:
    def made_of_two(second: float) -> Any:
        model = build_model("llama", "sdpa")
        norm: Any = model.model.norm
        norm.weight = torch.nn.Parameter(TwoTensor(norm.weight.detach(), norm.weight.detach() + second))
        return model

    assert fingerprint(made_of_two(1)) == fingerprint(made_of_two(1))
    assert fingerprint(made_of_two(1)) != fingerprint(made_of_two(2))
    assert fingerprint(made_of_two(0)) != fingerprint(build_model("llama", "sdpa"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_forwards_write_are_no_change_of_the_model(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 64}
    length = 256 if kind == "longrope" else 64
    model, twin = (build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=length) for _ in range(2))
    ids = some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        for cached in (0, 39, 39):
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(twin, ones(ids)))
            assert store.reuse[0].cached == cached
        assert not store.stats.problem
    fresh(model, ones(some_ids(90)))  # beyond the length where the embedding is stretched
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(twin, ones(ids)))
        store.generate(**ones(some_ids(90)), **GREEDY)
        for _ in range(2):
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(twin, ones(ids)))
            assert store.reuse[0].cached == 39
        assert not store.stats.problem


# What else they depend on


class Scaled(torch.nn.Module):
    """A module with an adapter, as adapter libraries have them."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters, self.disable_adapters, self.merged = ["a"], False, False
        self.scaling = {"a": 1.0}
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) * (1 + (0 if self.disable_adapters else self.scaling["a"]))


def test_an_adapter_that_differs_from_module_to_module_is_told_by_where_it_does() -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    scaled = []
    for layer in model.model.layers:
        layer.self_attn.k_proj = Scaled(layer.self_attn.k_proj)
        scaled.append(layer.self_attn.k_proj)
    assert len(scaled) == 3
    plain = dependence.adapters(model)
    assert plain == ("a 1.0 False",)
    with store_of(model) as store:
        for scales in ((0.5, 1.0, 1.0), (0.5, 0.5, 1.0), (1.0, 0.5, 0.5)):
            for module, scale in zip(scaled, scales, strict=True):
                module.scaling["a"] = scale
            assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        for module in scaled:
            module.scaling["a"] = 1.0
        assert dependence.adapters(model) == plain
        for off in range(3):
            for i, module in enumerate(scaled):
                module.disable_adapters = i == off
            assert tell(store, model, ids) == 0


class Adapted:
    """A model in an adapter of peft, which looks for token ids by their name only.

    Args:
        model: of Transformers.
        config: of the adapter that is active.
    """

    def __init__(self, model: Any, **config: Any) -> None:
        self.model, self.active_peft_config = model, SimpleNamespace(**config)
        self.given: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def get_base_model(self) -> Any:
        return self.model

    def generate(self, *_: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        """Generate behind two virtual tokens."""
        self.given.append(input_ids)
        virtual = torch.tensor([[3, 5]])
        ids, mask = (torch.cat([x, y], 1) for x, y in ((virtual, input_ids), (virtual > 0, attention_mask)))
        return self.model.generate(input_ids=ids, attention_mask=mask, **options)[:, 2:]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("config", [{"is_prompt_learning": True}, {"alora_invocation_tokens": [3, 5]}])
def test_an_adapter_that_computes_from_the_prompt_leaves_and_finds_nothing(name: str, config: Any) -> None:
    model, ids = tiny_model(name), some_ids(40)
    adapted = Adapted(model, **config)
    with store_of(adapted) as store:
        for given in ({"inputs": ids}, {"input_ids": ids}):
            out = store.generate(**given, attention_mask=torch.ones_like(ids), **GREEDY)
            assert torch.equal(out, adapted.generate(**ones(ids), **GREEDY))
            assert "adapter" in store.reuse[0].why
        assert store.stats.sequences == 0
    with pytest.raises(UnsupportedError, match="adapter"):
        Engine(adapted)


@pytest.mark.skipif("sdpa" not in attentions("gemma2"), reason="newer Transformers refuses it")
def test_what_attention_without_a_cap_on_scores_gave_is_of_use_there_only() -> None:
    model, ids = build_model("gemma2", "eager", attn_logit_softcapping=1.0), some_ids(40)
    with store_of(model) as store:
        for attention, cached in (("eager", 0), ("sdpa", 0), ("eager", 39), ("sdpa", 39)):
            model.set_attn_implementation(attention)
            assert tell(store, model, ids) == cached


def test_a_part_of_the_model_in_training_mode_leaves_and_finds_nothing() -> None:
    model, ids = build_model("llama", "sdpa"), some_ids(40)
    model.model.layers[1].mlp.up_proj.train()  # gives the same
    with store_of(model) as store:
        assert [tell(store, model, ids) for _ in range(2)] == [0, 39]
        attention = model.model.layers[1].self_attn
        attention.attention_dropout = 0.5
        attention.train()
        store.generate(**ones(ids), **GREEDY)
        assert (store.reuse[0].cached, store.reuse[0].why) == (0, "a LlamaAttention of the model is in training mode")
        store.generate(**ones(some_ids(20, seed=3)), **GREEDY)
        assert store.stats.sequences == 1
        attention.eval()
        assert tell(store, model, ids) == 39


def bidirectional() -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["full_attention"] * 2, use_bidirectional_attention=True,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [bidirectional, lambda: build_model("llama", "sdpa", is_causal=False)])
def test_a_model_whose_tokens_attend_to_those_behind_them_re_uses_nothing(make: Any) -> None:
    model, ids = make(), some_ids(60)
    with store_of(model) as store:
        for length in (40, 60):
            assert tell(store, model, ids[:, :length]) == 0
            assert "behind them" in store.reuse[0].why
        assert store.stats.sequences == 0


# What goes wrong


@pytest.mark.parametrize("what", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_an_interrupt_while_rows_change_leaves_no_keys_under_other_ids(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with store_of(model) as store, store.caches.new() as cache:
        ids = some_ids(12, rows=2)
        cache.begin(ids[:, :0])
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        assert isinstance(cache, JournalledCache)
        assert not cache.unknown
        change = getattr(TieredKVCache, what)
        argument = {"batch_repeat_interleave": 2}.get(what, torch.tensor([1, 0]))
        getattr(cache, what)(argument)
        assert not cache.unknown

        def interrupted(self: Any, *args: Any) -> None:
            change(self, *args)
            raise KeyboardInterrupt

        monkeypatch.setattr(TieredKVCache, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, what)(argument)
        assert cache.unknown


@pytest.mark.parametrize("at", [4, 9])
def test_an_interrupt_while_beams_change_places_leaves_no_wrong_token(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reorder, calls = tiny_model("llama"), TieredKVCache.reorder_cache, list[int]()

    def interrupted(self: Any, beams: torch.Tensor) -> None:
        reorder(self, beams)
        if isinstance(self, JournalledCache) and beams.tolist() != list(range(len(beams))):
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt

    with store_of(model) as store:
        monkeypatch.setattr(TieredKVCache, "reorder_cache", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.generate(**ones(some_ids(30, seed=at)), do_sample=False, num_beams=4, max_new_tokens=20)
        for entry in list(store._kept.entries.values()):
            row = [*memoryview(entry.ids).cast("q"), 5]
            tell(store, model, torch.tensor([row]))
        store.check_integrity()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError("no memory")])
@pytest.mark.parametrize("at", [1, 2], ids=["in the prompt", "at the end"])
def test_an_answer_is_not_lost_for_a_copy_of_states_that_has_no_memory(
    at: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, copied, calls = tiny_model("gemma3"), some_ids(40), prefix_reuse.copied, list[int]()

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error
        return copied(*args)

    assert not isinstance(error, KVTierError)
    with store_of(model) as store:
        monkeypatch.setattr(prefix_reuse, "copied", fails)
        assert tell(store, model, ids) == 0
        assert store.stats.problem == "no memory"
        assert store.stats.sequences == (1 if at == 1 else 0)
        assert tell(store, model, ids) == 0, "the copy within the prompt is the one that it would begin at"
        assert tell(store, model, ids) == 39
        store.check_integrity()
