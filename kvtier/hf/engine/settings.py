"""Settings of `generate` as a client writes them: which an engine honours, and what each may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig

from kvtier.errors import ConfigError

#: Settings that ask for something other than one sequence, token by token, with the values that do not.
OTHER_WAYS: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
}
#: Of settings that an engine does not honour, values that say what is the case anyway; of others, False does.
_PLAIN = OTHER_WAYS | {"diversity_penalty": (0.0,), "length_penalty": (1.0,), "use_cache": (True,)}

#: Of these, what a model's own config may ask of each call of `generate`: beams, and what is returned besides tokens.
_OF_MODELS = (
    "num_beams",
    "num_beam_groups",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
)

#: The largest number that a setting may be, which scores of 32 bits can be raised by; and lists within each other.
_LARGEST, _DEEPEST = 1e30, 3
#: The longest n-gram: Transformers copies a sequence once for each of its tokens, and where it is of an answer in every
#: step.
_LONGEST = 256


def token_by_token(own: Any) -> dict[str, Any]:
    """Settings that take back what a model's generation config asks for besides one sequence, token by token: beams, or
    scores next to the tokens."""
    return {name: OTHER_WAYS[name][-1] for name in _OF_MODELS if getattr(own, name, None) not in OTHER_WAYS[name]}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what an engine does not honour as it is written, or a `GenerationConfig` does not take.

    Raises:
        ConfigError: says which, or why.
    """
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(f"{unknown[0]!r:.80} is no setting of `generate`.")
    for name, value in settings.items():
        if name in _HONOURED:
            fits, what = _HONOURED[name]
            if not fits(value):
                raise ConfigError(f"{name}: give {what}, not {value!r:.80}.")
        elif value not in _PLAIN.get(name, (False,)):
            raise ConfigError(f"{name}={value!r:.80} is not supported: an engine decodes token by token, in its cache.")
    try:
        GenerationConfig(**settings)
    except Exception as error:  # whatever it does with what it is handed
        raise ConfigError(f"{type(error).__name__}: {error}.") from None


def _is_number(value: Any) -> bool:
    # Compared before it is converted: a whole number in JSON has as many digits as it likes, and NaN is not less.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_numbers(value: Any, depth: int = _DEEPEST) -> bool:
    """Numbers in a list, or in lists of it."""
    if not isinstance(value, list) or not depth:
        return False
    return all(_are_numbers(x, depth - 1) if isinstance(x, list) else _is_number(x) for x in value)


_Kind = tuple[Callable[[Any], bool], str]
_FLAG: _Kind = (lambda value: isinstance(value, bool), "true or false")
_COUNT: _Kind = (_is_count, "a whole number from 0 on")
_LENGTH: _Kind = (lambda value: _is_count(value) and value <= _LONGEST, f"a whole number from 0 to {_LONGEST}")
_NUMBER: _Kind = (_is_number, "a finite number")
_TOKEN: _Kind = (lambda value: _is_whole(value) or _are_tokens(value), "a token id, or a list of them")
_TOKENS: _Kind = (_are_tokens, "a list of token ids")
_LISTS: _Kind = (_are_numbers, "lists of finite numbers")

#: What each of the settings that an engine honours may be.
_HONOURED: dict[str, _Kind] = {
    **dict.fromkeys(("do_sample", "remove_invalid_values", "renormalize_logits"), _FLAG),
    **dict.fromkeys(("max_new_tokens", "min_length", "min_new_tokens", "top_k"), _COUNT),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), _LENGTH),
    **dict.fromkeys(("encoder_repetition_penalty", "max_time", "repetition_penalty", "temperature"), _NUMBER),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_p", "typical_p"), _NUMBER),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _TOKEN),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens"), _TOKENS),
    **dict.fromkeys(("bad_words_ids", "exponential_decay_length_penalty", "sequence_bias"), _LISTS),
}
