"""How long a real model takes: a layer's linear part by tokens, and prefill by new and cached tokens.

The model runs with a `TieredKVCache`, as in use; its last logits are computed, as `generate` asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.calibration.timing import in_turn
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.models.layers import is_full_attention, transformers_layers
from kvtier.hf.models.names import CACHE
from kvtier.planning.fit import held_out_error
from kvtier.planning.hardware.predictors import Linear, Prefill, PrefillSize

#: New tokens in which the linear part is measured, on so many cached ones that attention counts for little.
TOKENS, HELD = (1, 2, 4, 8, 16, 32, 64, 128, 256), 16
#: New tokens and cached tokens of prefills that are measured, as far as time and the model's positions allow.
NEW, PAST = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048), (0, 64, 128, 256, 512, 1024, 2048, 4096)
#: Of the time, the shares that the largest forward and that all in turn may take; and sizes at the least.
_LARGEST, _ROUND, _FEWEST = 0.1, 0.22, 8


#: Of the time, the share for rounds: caches are filled before.
_TIMED = 0.8

Calls = tuple[Callable[[], None], Callable[[], None]]


class _Cache(TieredKVCache):
    """Of what is measured, for which there may be no time."""

    _tells_unused = False


class Trial:
    """Forwards of a model on caches that are cut back after each.

    Args:
        model: that generates; it stays in the mode it is in.
        block_size: of the caches; None: their own choice.

    Attributes:
        layers: that its caches tier, into which plans divide a forward (`ModelSize.parts`); 1 where there are none.
        refills: whether the model keeps a recurrent state, from which no token can be taken back: its caches are
            emptied and filled again.

    Raises:
        ConfigError: the model has no config, an encoder, or no vocabulary.
    """

    def __init__(self, model: Any, block_size: int | None = None) -> None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        words = getattr(text, "vocab_size", None)
        if not isinstance(words, int) or getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"A {type(model).__name__} is no decoder that takes tokens alone: it cannot be timed.")
        self.model, self._config, self._words = model, config, words
        self._block_size = block_size
        self.layers = max(sum(map(is_full_attention, transformers_layers(config))), 1)
        self.most = int(getattr(text, "max_position_embeddings", None) or 2**30)
        self.device = model.device
        self.refills = False
        self._caches: dict[tuple[int, int], TieredKVCache] = {}

    def ids(self, new: int, batch: int = 1) -> torch.Tensor:
        """`[batch, new]` tokens, the same each time; no random numbers of the user's are drawn."""
        generator = torch.Generator("cpu").manual_seed(new)
        return torch.randint(0, self._words, (batch, new), generator=generator, device="cpu").to(self.device)

    def calls(self, size: PrefillSize) -> Calls:
        """A forward of that size, and what cuts its cache back to what it was."""
        if size.past:
            key = (size.past, size.batch)
            if key not in self._caches:
                self._caches[key] = self._new()
                self._fill(self._caches[key], size)
            cache = self._caches[key]
        else:
            cache = self._new()
            self._caches[-len(self._caches) - 1, 0] = cache  # to be closed
        tokens = self.ids(size.new, size.batch)

        def forward() -> None:
            self._forward(tokens, cache)

        def cut_back() -> None:
            if size.past and not self.refills:
                try:
                    return cache.crop(-size.new)
                except UnsupportedError:
                    self.refills = True
            cache.reset()
            if size.past:
                self._fill(cache, size)

        return forward, cut_back

    def _new(self) -> TieredKVCache:
        cache = _Cache(self._config, block_size="auto" if self._block_size is None else self._block_size)
        if any(cache.is_sliding) or any(cache.is_linear):  # else a full window gives no token back
            cache.activate_past_recording()
        return cache

    def _fill(self, cache: TieredKVCache, size: PrefillSize) -> None:
        self._forward(self.ids(size.past, size.batch), cache)
        cache.crop(0)  # what windows have recorded besides

    def _forward(self, tokens: torch.Tensor, cache: TieredKVCache) -> None:
        self.model(tokens, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give all caches' memory back."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()


def measure_linear(trial: Trial, seconds: float) -> list[tuple[float, float]]:
    """(tokens, seconds per tiered layer), for as many tokens as there is time for."""
    sizes = [PrefillSize(n, HELD) for n in TOKENS if n + HELD <= trial.most]
    made = _affordable(trial, sizes, seconds)
    times = _times(made, seconds * _TIMED)
    return [(float(size.new), x / trial.layers) for (size, _), x in zip(made, times, strict=True)]


def measure_prefill(
    trial: Trial, seconds: float, *, new: Sequence[int] = NEW, past: Sequence[int] = PAST
) -> list[tuple[PrefillSize, float]]:
    """Sizes and seconds of prefills, for as many as there is time for, in the order of their work."""
    sizes = [PrefillSize(n, p) for n in new for p in past if n + p <= trial.most and _on_grid(n, p, new, past)]
    sizes.sort(key=lambda x: (x.new * (x.new + x.past), x.new))
    made = _affordable(trial, sizes, seconds)
    times = _times(made, seconds * _TIMED)
    return [(size, x) for (size, _), x in zip(made, times, strict=True)]


def _on_grid(new: int, past: int, news: Sequence[int], pasts: Sequence[int]) -> bool:
    """Every second pair of sizes: as many tell as much, in half the time."""
    return (news.index(new) + pasts.index(past)) % 2 == 0


def _affordable(trial: Trial, sizes: Sequence[PrefillSize], seconds: float) -> list[tuple[PrefillSize, Calls]]:
    """Of sizes in the order of their work, some of which all can be timed several times in so many seconds.

    Where there is no time for all of them, large ones are left away first, then others at equal distances.
    """
    forward, cut_back = trial.calls(sizes[0])
    took = []
    for _ in range(2):
        began = time.perf_counter()
        forward()
        took.append(time.perf_counter() - began)
        cut_back()
    per_token = took[-1] / sizes[0].new

    def cost(size: PrefillSize) -> float:
        forwards = (size.new, size.past) if trial.refills and size.past else (size.new,)
        return sum([max(per_token * n * size.batch, took[-1]) for n in forwards])

    small = [x for x in sizes if max(cost(x), per_token * x.past * x.batch) <= _LARGEST * seconds] or sizes[:1]
    left, count = small, len(small)
    while count > _FEWEST and sum(map(cost, left)) > _ROUND * seconds:
        count -= 1
        left = _spread(small, count)
    return [(x, trial.calls(x)) for x in left]


def _spread(sizes: Sequence[PrefillSize], count: int) -> list[PrefillSize]:
    """So many of them at equal distances, the first and the last among them."""
    return [sizes[round(i * (len(sizes) - 1) / (count - 1))] for i in range(count)]


def _times(made: Sequence[tuple[PrefillSize, Calls]], seconds: float) -> list[float]:
    return in_turn([x[0] for _, x in made], seconds, after=[x[1] for _, x in made])


def linear_error(points: Sequence[tuple[float, float]]) -> float | None:
    """The mean absolute relative error for numbers of tokens left out of the fit."""
    return held_out_error(lambda some: Linear.fit(some).seconds, points)


def prefill_error(points: Sequence[tuple[PrefillSize, float]]) -> float | None:
    """The mean absolute relative error for sizes left out of the fit."""

    def fit(some: Sequence[tuple[PrefillSize, float]]) -> Callable[[PrefillSize], float]:
        found = Prefill.fit(some)
        return lambda size: found.seconds(size.new, size.past, size.batch)

    return held_out_error(fit, points)
