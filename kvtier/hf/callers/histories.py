"""What a cache holds against the prompt that comes: which tokens stay right, and whether the others are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from kvtier.errors import ConfigError, MismatchError
from kvtier.hf.callers.threads import generates

#: Frames between `generate` and the method of Transformers that is given a cache: classes add to it.
_MOST_FRAMES = 8


def common_prefix(new_ids: Any, held_ids: Any, held: int, rows: int | None) -> int:
    """Tokens of a cache that a new prompt begins with, in every row.

    Args:
        new_ids: of the prompt, `[rows, tokens]`, or one row of numbers.
        held_ids: of what the cache was given so far and of tokens that it was not, the same way.
        held: tokens in the cache.
        rows: of the cache; None: it has none yet.

    Returns:
        At most `held`, and fewer than the prompt has: its last token has to be computed.

    Raises:
        ConfigError: not token ids.
        MismatchError: other numbers of rows, or `held_ids` are fewer than the cache holds.
    """
    new, old = _ids("new_ids", new_ids), _ids("held_ids", held_ids)
    if not new.shape[1]:
        raise ConfigError("keep_prefix: new_ids are empty, and a prompt has at least one token.")
    if rows is not None and not new.shape[0] == old.shape[0] == rows:
        raise MismatchError(
            f"keep_prefix: new_ids have {new.shape[0]} rows and held_ids {old.shape[0]}, and the cache has {rows}. "
            "Nothing was changed."
        )
    if old.shape[1] < held:
        raise MismatchError(
            f"keep_prefix: held_ids are {old.shape[1]} tokens, but the cache holds {held}. Give all that it was given, "
            "answers included: what `generate` returned. Where that computed on for other processes (`synced_gpus`), "
            f"`cache.crop(-{held - old.shape[1] + 1})` first. Nothing was changed."
        )
    most = min(held, new.shape[1] - 1)
    same = (new[:, :most] == old[:, :most]).all(0)
    return most if bool(same.all()) else int(same.int().argmin())


def _ids(name: str, value: Any) -> torch.Tensor:
    try:
        ids = torch.as_tensor(value).to("cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        hint = " Give its `.input_ids`." if isinstance(value, Mapping) and "input_ids" in value else ""
        raise ConfigError(f"keep_prefix: {name} are not token ids: {error}.{hint}") from error
    if ids.is_floating_point() and not ids.numel():
        ids = ids.long()  # of an empty list
    if ids.dtype is torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() not in (1, 2):
        raise ConfigError(f"keep_prefix: {name} are not token ids, [rows, tokens] or one row.")
    return ids[None] if ids.dim() == 1 else ids


def check_cached(frame: FrameType | None) -> None:
    """Refuse a `generate` that is given a cache and told to use none, as checkpoints tell it whose config says so.

    Transformers gives the model the cache all the same, and with it the whole prompt again for each token.

    Args:
        frame: inside of `generate`, where it is given a cache.

    Raises:
        ConfigError: nothing was changed.
    """
    local = _generate(frame)
    if getattr(local.get("generation_config"), "use_cache", None) is False:
        raise ConfigError(
            "`generate` is given a cache and `use_cache=False`: for each token, Transformers would add the prompt "
            "to the cache again, with wrong tokens. Give `use_cache=True`, in the call or in "
            "`model.generation_config`, which has it from the checkpoint; or give no cache. Nothing was changed."
        )


def check_longer(frame: FrameType | None, held: int) -> None:
    """Refuse a `generate` that would compute parts of a prompt again behind what a cache holds, or leave parts out.

    Transformers computes again where a cache covers the whole prompt, and in assisted decoding wherever it is given
    more than the new tokens. It leaves tokens out where it is given embeddings of the new ones alone.

    Args:
        frame: inside of `generate`, where it is given a cache.
        held: tokens in the cache.

    Raises:
        MismatchError: nothing was changed.
    """
    local = _generate(frame)
    config, inputs = local.get("generation_config"), local.get("model_kwargs")
    if not held or not isinstance(inputs, dict) or getattr(config, "is_assistant", False):
        return
    embeds = inputs.get("inputs_embeds") if local.get("model_input_name") == "inputs_embeds" else None
    prompt = embeds.shape[1] if isinstance(embeds, torch.Tensor) else local.get("input_ids_length")
    if not isinstance(prompt, int) or (embeds is None and local.get("model_input_name") != "input_ids"):
        return
    mask: Sequence[Any] | Any = inputs.get("attention_mask")
    covered = mask.shape[1] if isinstance(mask, torch.Tensor) else getattr(config, "_mask_length", -1)
    whole = covered == prompt  # a mask that is longer than the ids says that these are new tokens only
    if "assisted" in getattr(local.get("generation_mode"), "value", ""):
        if whole or mask is not None:  # which it cuts to the length of the ids
            alone = f"Give it the new ones alone, `input_ids[:, {held}:]`, with an `attention_mask` of all; or"
            raise MismatchError(
                f"Assisted decoding computes every token that it is given, and Transformers would take the {prompt} of "
                f"the prompt for new ones behind the {held} that the cache holds, with wrong tokens. "
                f"{alone if mask is None else 'Leave assisted decoding away, or'} `cache.reset()`. Nothing was changed."
            )
    elif embeds is not None and covered > prompt:
        raise MismatchError(
            f"`inputs_embeds` have {prompt} tokens and `attention_mask` {covered}: Transformers takes embeddings for "
            f"the whole prompt and would leave out the first {held}, which the cache holds. Give those of all tokens. "
            "Nothing was changed."
        )
    elif 0 < prompt <= held and (whole or embeds is not None):
        raise MismatchError(
            f"The cache holds {held} tokens and the prompt has {prompt}: nothing is left to compute, and Transformers "
            "would add the prompt behind what is there, with wrong tokens. A prompt continues a cache if it begins "
            "with what that holds and is longer. `cache.keep_prefix(new_ids, held_ids)` keeps what both share; "
            "`cache.reset()` begins again. After a `generate` of this prompt that was cut short, `cache.crop(-"
            f"{held - prompt + 1})` keeps the prompt but its last token. Nothing was changed."
        )


def _generate(frame: FrameType | None) -> Mapping[str, Any]:
    """The variables of `generate`, where that has called what runs in a frame; none otherwise."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if generates(frame.f_code):
            return frame.f_locals
        frame = frame.f_back
    return {}
