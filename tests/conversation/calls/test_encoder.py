"""What an encoder gave is used again where a call has the same inputs, and only there; tokens are those of others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import VOCAB, build_model
from test_store import GREEDY, Tokenizer, ones, some_ids, store_of
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

from kvtier import ConversationStore

#: Bytes of what the encoder of `made` gives for 20 tokens.
BYTES = 20 * 32 * 4


def made(name: str) -> Any:
    if name == "t5":
        return build_model("t5", "sdpa")
    if name == "nllb_moe":
        sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
        experts = {"num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64}
        sizes |= experts | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCAB, "d_model": 32}
        torch.manual_seed(0)
        return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, eos_token_id=None)).eval()
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4,
        encoder_attention_heads=4, decoder_ffn_dim=32, encoder_ffn_dim=32, pad_token_id=0, eos_token_id=None,
        forced_eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


class Encoded:
    """A model, a store of it, and how often its encoder computed."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model, self.count = made(name), 0
        self.model.get_encoder().register_forward_hook(self._computed)
        self.store: ConversationStore = store_of(self.model, **options)

    def _computed(self, *_: Any) -> None:
        self.count += 1

    def ask(self, inputs: dict[str, Any], salt: Any = None, **options: Any) -> int:
        """A call, whose tokens are right. How often the encoder computed for it."""
        torch.manual_seed(3)
        right = self.model.generate(**inputs, **(GREEDY | options))
        torch.manual_seed(3)
        before = self.count
        assert torch.equal(self.store.generate(**inputs, salt=salt, **(GREEDY | options)), right)
        return self.count - before


@pytest.fixture(params=["t5", "bart"])
def encoded(request: pytest.FixtureRequest) -> Iterator[Encoded]:
    found = Encoded(request.param)
    with found.store:
        yield found


def test_other_answers_to_the_same_inputs_compute_the_decoder_only(encoded: Encoded) -> None:
    inputs = ones(some_ids(20))
    assert encoded.ask(inputs) == 1
    assert (encoded.store.reuse[0].cached, encoded.store.reuse[0].computed) == (0, 20)
    ways: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"do_sample": True}, {"max_new_tokens": 9})
    for options in ways:
        assert encoded.ask(inputs, **options) == 0
        assert (encoded.store.reuse[0].cached, encoded.store.reuse[0].computed) == (20, 0)
        assert encoded.store.reuse[0].why == ""
    assert encoded.ask(inputs, decoder_input_ids=torch.tensor([[1, 5, 7]])) == 0


def test_a_decoder_gets_an_output_of_the_class_that_it_reads() -> None:
    """Experts of NLLB-MoE have names of their own in it, which the decoder asks for."""
    found = Encoded("nllb_moe")
    with found.store:
        for computed in (1, 0, 0):
            assert found.ask(ones(some_ids(20))) == computed


def test_an_answer_in_a_chat_is_all_that_the_decoder_gives(encoded: Encoded) -> None:
    chat, tokenizer = encoded.store.open("a"), Tokenizer()
    for words in ("Who are you?", "And what?"):
        prompt = tokenizer.apply_chat_template([*chat.messages, {"role": "user", "content": words}])
        right = encoded.model.generate(**ones(torch.tensor([prompt])), **GREEDY)[0]
        assert chat.send(words, tokenizer=tokenizer, **GREEDY) == tokenizer.decode(right)
        assert chat.ids == right.tolist()


def test_other_inputs_are_computed(encoded: Encoded) -> None:
    inputs = ones(some_ids(20))
    encoded.ask(inputs)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :4] = 0
    for others in (ones(some_ids(20, seed=5)), ones(some_ids(20)[:, :19]), {**inputs, "attention_mask": mask}):
        assert encoded.ask(others) == 1
        assert encoded.ask(others) == 0
    assert encoded.store.reuse[0].cached == 16, "padding is no token"
    both = ones(torch.cat([some_ids(20), some_ids(20, seed=5)]))
    assert encoded.ask(both) == 1, "a batch is computed as one"
    assert encoded.ask(both) == 0
    assert encoded.ask(inputs, salt="other") == 1
    assert encoded.ask({"input_ids": some_ids(20)}) == 0, "the mask that is left out is the same one"
    padded = torch.cat([some_ids(16), torch.zeros(1, 4, dtype=torch.long)], 1)
    assert encoded.ask({"input_ids": padded}) == 1
    assert encoded.ask(ones(padded)) == 0, "and hides no padding"


def test_other_weights_and_cleared_stores_have_nothing(encoded: Encoded) -> None:
    inputs = ones(some_ids(20))
    encoded.ask(inputs)
    with torch.no_grad():
        next(iter(encoded.model.get_encoder().parameters())).mul_(-1.5)
    assert encoded.ask(inputs) == 1
    assert encoded.ask(inputs) == 0
    encoded.store.clear()
    assert encoded.store.stats.state_bytes == 0
    assert encoded.ask(inputs) == 1


def test_what_is_erased_is_computed_and_what_has_another_salt_is_not(encoded: Encoded) -> None:
    inputs = ones(some_ids(20))
    encoded.store.open("a").generate(**inputs, **GREEDY)
    assert encoded.ask(inputs, salt="b") == 1
    encoded.store.forget("a")
    assert encoded.ask(inputs) == 0
    encoded.store.open("a").generate(**inputs, **GREEDY)
    encoded.store.forget("a", erase=True)
    assert [x.salt for x in encoded.store._generating.encoder._outputs] == ["b"]
    assert [encoded.ask(inputs, salt=salt) for salt in (None, "b")] == [1, 0]


def test_what_is_kept_has_a_budget() -> None:
    encoded = Encoded("bart", state_budget=2 * BYTES)
    with encoded.store:
        for seed in range(4):
            assert encoded.ask(ones(some_ids(20, seed=seed))) == 1
            assert encoded.store.stats.state_bytes <= 2 * BYTES
        assert [encoded.ask(ones(some_ids(20, seed=seed))) for seed in (3, 2)] == [0, 0]
        assert encoded.ask(ones(some_ids(60, seed=9))) == 1, "it does not fit, and nothing goes for it"
        assert encoded.ask(ones(some_ids(20, seed=3))) == 0
        assert encoded.ask(ones(some_ids(20, seed=1))) == 1


def test_what_depends_on_more_is_computed_and_says_so(encoded: Encoded) -> None:
    inputs, model, store = ones(some_ids(20)), encoded.model, encoded.store
    encoded.ask(inputs)
    out = store.generate(**inputs, **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert out.encoder_hidden_states is not None
    assert store.reuse[0].why == "more than the last output of the encoder is asked for"
    hidden = model.get_encoder()(**inputs)
    assert torch.equal(
        store.generate(encoder_outputs=hidden, **GREEDY), model.generate(encoder_outputs=hidden, **GREEDY)
    )
    model.train()
    store.generate(**inputs, **GREEDY)
    assert store.reuse[0].why == "the model is in training mode"


def test_padding_is_no_part_of_what_is_counted_where_a_call_re_uses_nothing(encoded: Encoded) -> None:
    ids = torch.cat([torch.nn.functional.pad(some_ids(9), (0, 5)), some_ids(14)])
    inputs, store = {"input_ids": ids, "attention_mask": (ids != 0).long()}, encoded.store
    for options in ({}, {"output_hidden_states": True, "return_dict_in_generate": True}):
        store.generate(**inputs, **GREEDY, **options)
        assert [(x.prompt, x.cached, x.computed) for x in store.reuse] == [(9, 0, 9), (14, 0, 14)]
    assert store.stats.prompt_tokens == 2 * (9 + 14)


def test_what_was_given_cannot_be_changed_by_its_user(encoded: Encoded) -> None:
    inputs = ones(some_ids(20))
    encoded.ask(inputs)

    def spoil(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["encoder_outputs"].last_hidden_state.zero_()

    hook = encoded.model.register_forward_pre_hook(spoil, with_kwargs=True)
    encoded.store.generate(**inputs, **GREEDY)
    hook.remove()
    assert encoded.ask(inputs) == 0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no memory"), MemoryError()]
)
def test_where_a_copy_does_not_fit_a_call_goes_on_and_says_what_is_not_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, inputs = Encoded("bart"), ones(some_ids(20))
    with encoded.store as store:
        fails(error, monkeypatch)
        assert encoded.ask(inputs) == 1
        assert store.stats.state_bytes == 0
        assert "what an encoder gave is not kept" in store.stats.problem
        monkeypatch.undo()
        assert [encoded.ask(inputs), encoded.ask(inputs)] == [1, 0]
        fails(error, monkeypatch)
        assert encoded.ask(inputs) == 0, "the call has what was kept itself"
        assert store.stats.state_bytes == 0, "which its user may change"
        monkeypatch.undo()
        assert [encoded.ask(inputs), encoded.ask(inputs)] == [1, 0]


def fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is as large as what the encoder gives cannot be copied here, but for what the model itself copies."""
    clone = torch.Tensor.clone

    def clones(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if sys._getframe(1).f_globals["__name__"] == "kvtier.conversation.calls.encoder":
            raise error
        return clone(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "clone", clones)
