"""A model whose keys and values follow from the tokens up to them, and which compares all that it reads with that.

It has of a Transformers model what a store and a cache ask for, and takes a fraction of a millisecond for a token. A
block of other tokens, of another layer or of another moment is noticed in the forward that reads it.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.nn import functional as F
from transformers import Gemma3TextConfig, GenerationConfig, LlamaConfig, Qwen3NextConfig
from walk import TOLERANCE

from kvtier import BudgetError
from kvtier.conversation.journal import JournalledCache
from kvtier.hf.models.identity.dependence import adapters
from kvtier.hf.models.names import CACHE

PAD, END, VOCAB = 0, 6, 7
#: Tokens that a sliding layer sees, and that a recurrent one keeps besides its state.
WINDOW, KERNEL = 6, 3
#: What some layers keep in place of all keys and values.
States = Literal["", "windows", "recurrent"]
_WORD = (1 << 63) - 1


@functools.cache
def _config(layers: int, states: States) -> Any:
    if not states:
        return _plain(LlamaConfig)(num_hidden_layers=layers, vocab_size=VOCAB)
    if states == "windows":
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        options: dict[str, Any] = {"layer_types": kinds, "sliding_window": WINDOW}
        return _plain(Gemma3TextConfig)(num_hidden_layers=layers, vocab_size=VOCAB, **options)
    kinds = ["full_attention" if i % 2 else "linear_attention" for i in range(layers)]
    return _plain(Qwen3NextConfig)(num_hidden_layers=layers, vocab_size=VOCAB, layer_types=kinds)


@functools.cache
def _plain(kind: type) -> type:
    """A config that looks for other names of an attribute only where it has none: that takes a tenth of the time."""

    def other(config: Any, name: str) -> Any:
        mapped = type(config).attribute_map.get(name)
        if mapped is None:
            raise AttributeError(name)
        return object.__getattribute__(config, mapped)

    return type(kind.__name__, (kind,), {"__getattribute__": object.__getattribute__, "__getattr__": other})


@functools.cache
def _generation() -> GenerationConfig:
    return GenerationConfig(pad_token_id=PAD, eos_token_id=None, do_sample=False)


class Adapter(torch.nn.Module):
    """As adapter libraries have them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Identity()
        self.active_adapters, self.disable_adapters, self.scaling = ["first"], True, {"first": 1.0}


class Toy(torch.nn.Module):
    """A causal language model.

    Args:
        rng: of its shape.
        states: that some layers keep.

    Attributes:
        rng: of how what was read is compared.
        states: as given; "": all layers keep all keys and values.
        meanwhile: called between layers.
        computed: what it gave keys and values to in a store's cache: see `prefixes`.
        held: after `generate`, the tokens that the cache has of each row.
    """

    def __init__(self, rng: random.Random, states: States = "") -> None:
        super().__init__()
        self.rng, self.states = rng, states
        layers = 2 if states else rng.choice((1, 2, 2, 3))
        self.config, self.generation_config = _config(layers, states), _generation()
        self.kinds: list[States] = ["" if i % 2 else states for i in range(layers)]
        self.heads, self.groups, self.k_dim = rng.choice((1, 1, 2)), rng.choice((1, 2)), rng.choice((4, 8))
        self.v_dim = rng.choice((self.k_dim, self.k_dim, 3))
        self.kv_dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16))
        self.weight = torch.nn.Parameter(torch.tensor([float(rng.randrange(1000))]))
        self.adapter = Adapter()
        self.eval()
        most = max(self.k_dim, self.v_dim)
        draw = torch.Generator("cpu").manual_seed(rng.randrange(2**31))
        odd = torch.randint(2**62, (layers, 2, 1, self.heads, 1, most), generator=draw) * 2 + 1
        self._factors, self._draw = odd, draw
        self.meanwhile: Callable[[], None] = lambda: None
        self.computed: set[int] = set()
        self.held: list[list[int]] = []
        self.gives_again = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.weight.dtype

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token in all layers."""
        return len(self.kinds) * self.heads * (self.k_dim + self.v_dim) * self.kv_dtype.itemsize

    # What follows from tokens

    def prefixes(self, ids: Sequence[int], before: int | None = None) -> list[int]:
        """For each token a number that follows from all tokens up to it, the weights and the adapters."""
        at = zlib.crc32(repr((float(self.weight.detach()), adapters(self))).encode()) if before is None else before
        found = []
        for x in ids:
            at = ((at ^ (x + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _WORD
            at ^= at >> 29
            found.append(at)
        return found

    @staticmethod
    def next(prefix: int, number: int, ends: bool) -> int:
        """The token behind a prefix, of the sequence of that number of a prompt."""
        token = 1 + ((prefix >> 17) + number) % (VOCAB - 1)
        return token if ends or token != END else 1

    def answer(self, rows: Sequence[Sequence[int]], pads: Sequence[int], options: dict[str, Any]) -> list[list[int]]:
        """What `generate` gives, without a cache."""
        found, _ = self._generated(rows, pads, options, lambda *_: None, lambda order: None)
        return found

    def _kv(self, prefixes: torch.Tensor) -> torch.Tensor:
        """`[layers, 2, rows, heads, tokens, dim]`."""
        found = (prefixes[None, None, :, None, :, None] * self._factors >> 53) & 0xFF
        return ((found - 128) / 256).to(self.kv_dtype)

    # As Transformers calls it

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # until 5.24
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        known: list[list[int]] | None = None,
        pads: Sequence[int] = (),
    ) -> Any:
        """Give a cache the keys and values of tokens, and compare what it has then."""
        cache, new = past_key_values if cache is None else cache, input_ids.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        if known is None:
            known = self._known(cache, input_ids, past)
        total = past + new
        assert all(len(row) == total for row in known), f"{past} tokens are cached, {new} are given: {known}"
        if type(cache) is JournalledCache:
            for row, pad in zip(known, pads or [0] * len(known), strict=True):
                self.computed.update(row[max(pad, past) :])
        right = self._kv(torch.tensor(known))
        for i, kind in enumerate(self.kinds if cache is not None else ()):
            if kind == "recurrent":
                self._recur(cache, i, known, past)
                self.meanwhile()
                continue
            k, v = right[i, 0, ..., : self.k_dim], right[i, 1, ..., : self.v_dim]
            try:
                keys, values = cache.update(k[:, :, past:].clone(), v[:, :, past:].clone(), i)
            except BudgetError:
                assert i <= self.kinds.index(""), "a forward is refused in its midst"
                raise
            first = max(past - WINDOW + 1, 0) if kind == "windows" else 0
            assert keys.shape == (len(known), self.heads, total - first, self.k_dim), (keys.shape, past, new)
            assert values.shape == (len(known), self.heads, total - first, self.v_dim), (values.shape, past, new)
            if past:
                try:
                    self._compare(i, (keys, values), (k[:, :, first:], v[:, :, first:]), new, [x - first for x in pads])
                except BudgetError as error:
                    raise AssertionError("a forward is refused in its midst") from error
            self.meanwhile()
        logits = torch.zeros(1, 1, VOCAB)
        logits[0, 0, self.next(known[0][-1], 0, True)] = 1.0
        return SimpleNamespace(logits=logits)

    @staticmethod
    def _recur(cache: Any, layer: int, known: list[list[int]], past: int) -> None:
        """A layer whose state is that of the last token, and which has some tokens before the next one."""
        if past:
            state = cache.layers[layer].recurrent_states[0][:, 0].tolist()
            assert state == [row[past - 1] for row in known], f"the state of layer {layer}"
        new = torch.tensor([[row[past:]] for row in known])
        seen = cache.update_conv_state(new, layer, conv_kernel_size=KERNEL)[:, 0].tolist()
        right = [([0] * KERNEL + row)[-len(x) :] for x, row in zip(seen, known, strict=True)]
        assert seen == right, f"what layer {layer} has seen last"
        cache.update_recurrent_state(torch.tensor([[row[-1]] for row in known]), layer)

    def _known(self, cache: Any, new: torch.Tensor, past: int) -> list[list[int]]:
        if isinstance(cache, JournalledCache) and past:
            found = [self.prefixes(row) for row in cache.ids[:, : past + new.shape[1]].tolist()]
        else:
            before = cache.__dict__["known"] if past else [[] for _ in new]
            found = [
                row + self.prefixes(ids, row[-1] if row else None)
                for row, ids in zip(before, new.tolist(), strict=True)
            ]
        if cache is not None:
            cache.__dict__["known"] = found
        return found

    def _compare(self, layer: int, views: Any, right: Any, new: int, pads: Sequence[int]) -> None:
        """What a layer has is what its tokens say; but for padding, which nobody reads."""
        if self.rng.random() < 0.4 or any(type(x) is torch.Tensor for x in views):
            for name, x, y in zip(("keys", "values"), views, right, strict=True):
                dense = x if type(x) is torch.Tensor else x.dense()
                for row in range(len(y) if any(x > 0 for x in pads) else 0):
                    pad = max(pads[row], 0)
                    assert torch.equal(dense[row, :, pad:], y[row, :, pad:]), f"{name} of layer {layer}, row {row}"
                if not any(x > 0 for x in pads):
                    assert torch.equal(dense, y), f"{name} of layer {layer}: {_where(dense, y)}"
            return
        rows, heads, tokens, dim = right[0].shape
        query = torch.randn(rows, heads * self.groups, new, dim, generator=self._draw).to(self.kv_dtype)
        mask = None
        if new > 1 or any(pads):
            mask = torch.ones(new, tokens, dtype=torch.bool).tril(tokens - new).repeat(rows, 1, 1, 1)
            for row, pad in enumerate(pads):
                mask[row, ..., : max(pad, 0)] = False
        options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": self.groups > 1}
        out = F.scaled_dot_product_attention(query, *views, **options)
        want = F.scaled_dot_product_attention(query.double(), *(x.double() for x in right), **options)
        some = TOLERANCE[self.kv_dtype]
        off = float((out.double() - want).abs().max())
        assert off <= some, f"attention of layer {layer} to {tokens} tokens is off by {off}"

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor,
        generation_config: Any = None,
        *,
        attention_mask: torch.Tensor,
        cache: Any = None,
        past_key_values: Any = None,  # until 5.24
        **options: Any,
    ) -> torch.Tensor:
        """Tokens that follow from those before; beams change rows after every step."""
        cache = past_key_values if cache is None else cache
        rows = inputs.tolist()
        pads = [row.count(0) for row in attention_mask.tolist()]

        def step(ids: list[list[int]], known: list[list[int]], pads: list[int]) -> None:
            past = cache.get_seq_length()
            assert past < len(ids[0]), "the whole prompt is cached"
            if self.gives_again:
                past, self.gives_again = 0, False
            self(
                input_ids=torch.tensor([row[past:] for row in ids]),
                attention_mask=None,
                known=known,
                pads=pads if any(pads) else (),
                **{CACHE: cache},
            )

        def reorder(order: list[int]) -> None:
            cache.reorder_cache(torch.tensor(order))

        found, self.held = self._generated(rows, pads, options, step, reorder)
        return torch.tensor(found)

    def _generated(
        self,
        rows: Sequence[Sequence[int]],
        pads: Sequence[int],
        options: dict[str, Any],
        step: Callable[[list[list[int]], list[list[int]], list[int]], None],
        reorder: Callable[[list[int]], None],
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The rows of an answer, and what a cache holds of them, without padding."""
        beams, several = options.get("num_beams") or 1, options.get("num_return_sequences") or 1
        each, ends = max(beams, several), options.get("eos_token_id") is not None
        ids = [list(row) for row in rows for _ in range(each)]
        pads = [pad for pad in pads for _ in range(each)]
        known = [[0] * pad + self.prefixes(row[pad:]) for row, pad in zip(ids, pads, strict=True)]
        over = [False] * len(ids)
        held = [list(row) for row in ids]
        for _ in range(options.get("max_new_tokens", 1)):
            step(ids, known, pads)
            held = [row[pad:] for row, pad in zip(ids, pads, strict=True)]
            if beams > 1:
                order = [i - i % each + (known[i][-1] >> 7) % each for i in range(len(ids))]
                reorder(order)
                ids, known, over = (
                    [list(x[i]) if type(x[i]) is list else x[i] for i in order] for x in (ids, known, over)
                )
                held = [held[i] for i in order]
            for i, row in enumerate(ids):
                token = PAD if over[i] else self.next(known[i][-1], i % each, ends)
                over[i] = over[i] or (ends and token == END)
                row.append(token)
                known[i] += self.prefixes([token], known[i][-1])
            if all(over):
                break
        found = [row for i, row in enumerate(ids) if i % each < several]
        return found, held


def _where(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"{tuple(a.shape)} and not {tuple(b.shape)}"
    wrong = (a != b).any(-1).any(1)
    return f"tokens {[x.nonzero().flatten().tolist() for x in wrong]} of {a.shape[2]}"
