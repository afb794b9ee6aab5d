"""What a cache does not have, for whoever asks for it, and a class that is no cache."""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError, UnsupportedError


class NoHalfError(UnsupportedError, AttributeError):
    """An attribute that only an `EncoderDecoderCache` has; for `hasattr`, one that is missing."""


class NoLayerError(UnsupportedError, IndexError):
    """A layer that was not updated yet; for `try: ... except IndexError`, one that is missing."""


class GrowingLayers(list[Any]):
    """Layers of a cache without a config, made as a model updates them."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise NoLayerError(
                f"Layer {index} is not there yet: without a config, layers are made when a model updates keys and "
                f"values, and {len(self)} were. Make the cache with TieredKVCache(model.config)."
            ) from None


class NeverGiven(type):
    """Refuses a class in place of a cache: what `generate` sets on it would replace the property of every cache, and
    with it the check of later prompts."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "_is_user_defined":
            raise ConfigError(
                f"This is the class {cls.__name__}. Give `generate` a cache: {cls.__name__}(model.config)."
            )
        super().__setattr__(name, value)
