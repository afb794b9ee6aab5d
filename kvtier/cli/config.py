"""The config of a model that a command names: from a file, a folder, or the hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import Weights

#: What of a config says how many positions its model has.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
#: What says how many layers there are, and the most that a model is taken to have.
LAYERS, MOST_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 10_000

#: What is asked for where a model is loaded, and where its config is enough.
_MODEL = "give a folder of a model, or a name on the hub"
_CONFIG = "give a config.json, a folder that holds one, or a name on the hub"


def read_config(name: str, *, loaded: bool = False) -> Mapping[str, Any]:
    """The config of a model, from a file, a folder, or the hub, with the defaults of its model type.

    Args:
        loaded: whether the model is loaded by this name, too: it is not that of a file.

    Raises:
        ConfigError: there is none, or it is no config.
    """
    return completed_config(raw_config(name, loaded=loaded))[0]


def raw_config(name: str, *, loaded: bool = False) -> Mapping[str, Any]:
    """The config as it is written, which a model type's defaults are not part of."""
    from kvtier.hf.models.checkpoint.config import config_by_name

    path = Path(name)
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"There is no {name}: {error}") from error
    if loaded and path.is_file():
        raise ConfigError(f"{name} is a file: {_MODEL}.")
    folder = path.is_dir()
    if folder:
        path /= "config.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no config.")
        return _checked(found)
    if folder:
        raise ConfigError(f"There is no config.json in {name}: {_MODEL}.")
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"There is no {name}: {_MODEL if loaded else _CONFIG}.")
    return _checked(config_by_name(name))


def completed_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config with the defaults of its model type; and what a reader has to know of it."""
    from kvtier.hf.models.checkpoint.config import completed

    found, why = completed(config)
    text = config.get("text_config")
    if not why or "layer_types" in (text if isinstance(text, Mapping) else config):
        return found, ()
    return found, (
        f"Which layers have full attention is not known, and all are taken to have it: {why}. If some have not, less "
        "KV is tiered than this plan says.",
    )


def weights_of(config: Mapping[str, Any]) -> tuple[Weights | None, str]:
    """The weights as they are counted in the model; or why they could not be."""
    from kvtier.hf.models.checkpoint.weights import count_weights

    try:
        return count_weights(config), ""
    except ConfigError as error:
        return None, str(error)


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Positions that the model has, as its config says; None: it does not."""
    text = config.get("text_config")
    config = {**config, **(text if isinstance(text, Mapping) else {})}
    found = next((x for x in map(config.get, POSITIONS) if isinstance(x, int) and x > 0), None)
    for name in (
        "rope_parameters",
        "rope_scaling",
    ):  # YaRN and others reach further than the model was trained at first
        rope = config.get(name)
        rope = rope if isinstance(rope, Mapping) else {}
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if found and isinstance(factor, (int, float)) and isinstance(original, int) and factor > 1:
            with contextlib.suppress(OverflowError):  # beyond what a float holds, and any model
                found = max(found, int(factor * original))
    return found


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, unless it has so many layers that to make something of each takes minutes."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in LAYERS:
            count = part.get(name)
            if isinstance(count, int) and count > MOST_LAYERS:
                raise ConfigError(f"{name} is larger than {MOST_LAYERS}: this is no config of a model.")
    return config
