"""`Asked`: what a body asks. Every field is honoured, or refused with the reason. Nothing is ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier.hf.engine.settings import check_settings
from kvtier.hf.models.checkpoint.templates import NOT_OF_TEMPLATES
from kvtier.serving.http.requests.refusals import invalid, shown

if TYPE_CHECKING:
    from kvtier.serving.http.requests.grammars import Grammar

#: Bounds of the interface.
MAX_SAMPLES, MAX_STOPS, MAX_TOP_LOGPROBS = 128, 16, 20
_LONGEST_STOP, _LONGEST_NAME = 1024, 256
#: Digits of a token id.
_LONGEST_ID = 18
#: Sequences of tokens that a setting has, and token ids in all of them: each is looked at for each token of an answer.
_MAX_SEQUENCES, _MAX_IDS = 1024, 8192
#: The largest number that a field may be.
_LARGEST = 1e300
#: The temperature below which the likeliest token is taken, and the highest: scores divided by less, or those that bar
#: a token by more, are no numbers any more. So are those that a penalty divides.
_COLDEST, _HOTTEST = 1e-5, 1e5
_DIVISORS = ("temperature", "repetition_penalty", "encoder_repetition_penalty")

#: Fields that every endpoint has: those of OpenAI, and those that vLLM and Transformers add.
_COMMON = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "seed",
        "user",
        "prompt_cache_key",
        "safety_identifier",
        "metadata",
        "service_tier",
        "store",
    )
)
_OWN = frozenset(
    (
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "cache_salt",
        "session_id",
        "generation_config",
    )
)
_TEXT = frozenset(
    ("n", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "max_tokens", "priority")
)
_FIELDS = {
    "chat": _COMMON
    | _OWN
    | _TEXT
    | frozenset(
        (
            "messages",
            "max_completion_tokens",
            "top_logprobs",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "response_format",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
            "reasoning_effort",
            "modalities",
            "functions",
            "function_call",
        )
    ),
    "completions": _COMMON | _OWN | _TEXT | frozenset(("prompt", "best_of", "echo", "suffix", "response_format")),
    "responses": _COMMON
    | _OWN
    | frozenset(
        (
            "input",
            "instructions",
            "max_output_tokens",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "text",
            "chat_template_kwargs",
            "reasoning",
            "include",
            "background",
            "previous_response_id",
            "truncation",
            "max_tool_calls",
            "top_logprobs",
        )
    ),
}


@dataclass
class Asked:
    """What a request asks, of whatever endpoint.

    Attributes:
        stream: whether parts are sent as they come.
        usage, usage_so_far: whether what it took is sent behind them, and with each of them.
        count: answers to each prompt.
        max_tokens: of an answer; None: the server's.
        settings: of `generate`, by name.
        stop: strings that end an answer.
        presence, frequency: what the scores of tokens lose that the answer has: once each, and for each time.
        seed: of the request's random numbers.
        logprobs: whether log-probabilities are sent, and of how many of the likeliest tokens.
        session, cache_salt: that the body names.
        tools: that the model may call.
        template: what the chat template is given besides messages.
        continues: whether the answer goes on from the last message, which is how it begins.
        begun: once there is a prompt, its text before that message, and what of the message it ends with; None: it
            begins no answer.
        form: the JSON schema of an answer, and the field that has it; None: it is any text.
        grammar: made of that.
    """

    stream: bool = False
    usage: bool = False
    usage_so_far: bool = False
    count: int = 1
    max_tokens: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    presence: float = 0.0
    frequency: float = 0.0
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    session: str | None = None
    cache_salt: str | None = None
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    begun: tuple[str, str] | None = None
    form: tuple[str, Mapping[str, Any]] | None = None
    grammar: Grammar | None = None


def asked_of(kind: str, body: Mapping[str, Any]) -> Asked:
    """What a body asks.

    Args:
        kind: "chat", "completions", "responses".

    Raises:
        Refusal: a field that is not known or malformed, or that cannot be honoured.
    """
    given = {name: value for name, value in body.items() if value is not None}  # many clients send all that they know
    unknown = sorted(given.keys() - _FIELDS[kind])
    if unknown:
        raise invalid(unknown[0], f"there is no such field in this request. Fields: {', '.join(sorted(_FIELDS[kind]))}")
    read = _Read(given)
    found = Asked(stream=read.flag("stream"), count=read.whole("n", 1, MAX_SAMPLES) or 1)
    found.usage, found.usage_so_far = _usage(given, found.stream)
    _refuse(given)
    found.settings = _settings(read, given)
    found.max_tokens = _Read(found.settings).whole("max_new_tokens", 1)  # of a generation_config
    found.settings.pop("max_new_tokens", None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        limit = read.whole(name, 1)
        found.max_tokens = limit if limit is not None else found.max_tokens
    found.seed = read.whole("seed", -(1 << 63), (1 << 63) - 1)
    found.presence = read.number("presence_penalty", -2, 2) or 0.0
    found.frequency = read.number("frequency_penalty", -2, 2) or 0.0
    found.stop = _stops(given.get("stop"))
    found.session = read.name("session_id") or read.name("prompt_cache_key") or read.name("user")
    found.cache_salt = read.name("cache_salt")
    found.tools = _tools(given)
    found.template = _template(given)
    found.form = _form(given)
    found.continues = _continues(read, given, found)
    if found.form and found.tools:
        raise invalid("tools", f"an answer that is held to {found.form[0]} calls nothing: leave out one of the two")
    if kind == "completions":
        found.top_logprobs = read.whole("logprobs", 0, MAX_TOP_LOGPROBS) or 0
        found.logprobs = "logprobs" in given
        _check_completion(given, found)
    else:
        found.logprobs = read.flag("logprobs")
        found.top_logprobs = read.whole("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
        if found.top_logprobs and not found.logprobs:
            raise invalid("top_logprobs", "it needs logprobs: true" if kind == "chat" else "it is not supported")
    return found


class _Read:
    """Fields by what they must be."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def flag(self, name: str) -> bool:
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise invalid(name, f"give true or false, not {shown(value)}")
        return value

    def number(self, name: str, least: float, most: float = math.inf, *, above: bool = False) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        # Compared before it is converted: a whole number in JSON has as many digits as it likes.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < _LARGEST:
            raise invalid(name, f"give a number, not {shown(value)}")
        if not least <= value <= most or (above and value == least):
            limit = f"{'above' if above else 'at least'} {least:g}" + (f", at most {most:g}" if most < math.inf else "")
            raise invalid(name, f"give a number {limit}, not {shown(value)}")
        return float(value)

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(name, f"give a whole number, not {shown(value)}")
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" + (f", at most {most}" if most is not None else "")
            raise invalid(name, f"give a number, {limit}, not {shown(value)}")
        return value

    def name(self, name: str) -> str | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
            raise invalid(name, f"give a string of 1 to {_LONGEST_NAME} characters")
        return value


def _settings(read: _Read, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `generate`. Which a model has where nothing is asked is left to it."""
    found = dict[str, Any]()
    if "generation_config" in given:
        found |= _generation_config(given["generation_config"])
    temperature = read.number("temperature", 0, _HOTTEST)
    if temperature is not None:
        cold = temperature < _COLDEST
        found |= {"do_sample": False} if cold else {"do_sample": True, "temperature": temperature}
    shares = {
        "top_p": read.number("top_p", 0, 1, above=True),
        "min_p": read.number("min_p", 0, 1),
        "top_k": read.whole("top_k", -1),
    }
    # What clients send to leave a setting out.
    plain = {"top_p": (1.0,), "min_p": (0.0,), "top_k": (0, -1)}
    for name, value in shares.items():
        if value is not None and value not in plain[name]:
            if temperature is not None and cold:
                raise invalid(name, "it is of sampling, and temperature 0 does not sample")
            found |= {"do_sample": True, name: value}
        elif value is not None:
            found[name] = {"top_p": 1.0, "min_p": None, "top_k": 0}[name]
    penalty = read.number("repetition_penalty", _COLDEST, _HOTTEST)
    if penalty is not None:
        found["repetition_penalty"] = penalty
    least = read.whole("min_tokens", 0)
    if least:
        found["min_new_tokens"] = least
    if read.flag("ignore_eos"):
        found["eos_token_id"] = -1
    if "logit_bias" in given:
        found["sequence_bias"] = _bias(given["logit_bias"])
        if not found["sequence_bias"]:
            del found["sequence_bias"]
    return found


def _generation_config(text: Any) -> dict[str, Any]:
    """The field of `transformers serve`: a GenerationConfig as a JSON string."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise invalid("generation_config", f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid("generation_config", "give a JSON object of settings of `generate`")
    found = {str(name): value for name, value in found.items() if value is not None}
    found.pop("transformers_version", None)  # `GenerationConfig.to_json_string` says it
    barred = sorted(found.keys() & _BARRED)
    if barred:
        raise invalid("generation_config", f"{barred[0]} cannot be set: there are n, stop and max_tokens")
    for name in ("bad_words_ids", "sequence_bias"):
        _check_sequences(name, found.get(name))
    for name in _DIVISORS:
        value = found.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:  # `generate` takes 0 for none
            continue
        if value < _COLDEST or value > _HOTTEST:
            plain = ", or do_sample: false" if name == "temperature" else ""
            raise invalid("generation_config", f"{name}: give {_COLDEST:g} to {_HOTTEST:g}{plain}")
    try:
        check_settings(found)
    except (ConfigError, RecursionError) as error:
        raise invalid("generation_config", str(error).removesuffix(".")) from None
    # A token counts once, so that no list is longer than the vocabulary: each token of an answer is compared with it.
    return {
        name: list(dict.fromkeys(value)) if name in _SETS and isinstance(value, list) else value
        for name, value in found.items()
    }


def _check_sequences(name: str, value: Any) -> None:
    """Refuse more sequences of tokens, or longer ones, than a step should look at. What they are is looked at later."""
    if not isinstance(value, (list, dict)):
        return
    ids = sum(_ids(each) for each in value)
    if len(value) > _MAX_SEQUENCES or ids > _MAX_IDS:
        most = f"at most {_MAX_SEQUENCES} sequences of tokens, with at most {_MAX_IDS} token ids in all"
        raise invalid("generation_config", f"{name}: {most}, and it has {len(value)}, with {ids}")


def _ids(sequence: Any) -> int:
    """Token ids in a sequence of them, which may be in a pair with what it is worth."""
    if not isinstance(sequence, list):
        return 0
    return sum(len(x) for x in sequence if isinstance(x, list)) or len(sequence)


#: Settings that are sets of token ids.
_SETS = frozenset(("begin_suppress_tokens", "eos_token_id", "suppress_tokens"))


#: Settings of `generate` that have a field of their own.
_BARRED = frozenset(("num_return_sequences", "stop_strings", "max_length"))


def _bias(value: Any) -> dict[tuple[int, ...], float]:
    if not isinstance(value, dict) or len(value) > _MAX_SEQUENCES:
        raise invalid("logit_bias", f"give an object of token ids and numbers, at most {_MAX_SEQUENCES}")
    found = dict[tuple[int, ...], float]()
    for token, bias in value.items():
        number = not isinstance(bias, bool) and isinstance(bias, (int, float)) and -100 <= bias <= 100
        if not str(token).isdecimal() or len(token) > _LONGEST_ID or not number:
            raise invalid("logit_bias", f"{shown(token)}: {shown(bias)} is no token id and number from -100 to 100")
        found[(int(token),)] = float(bias)
    return found


def _stops(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or len(strings) > MAX_STOPS or not all(_is_stop(x) for x in strings):
        raise invalid("stop", f"give a string, or at most {MAX_STOPS}, each of 1 to {_LONGEST_STOP} characters")
    return strings


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_STOP


def _usage(given: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    """Whether what a stream took is sent behind it, and with each part."""
    options = given.get("stream_options", {})
    if options and not stream:
        raise invalid("stream_options", "it is of stream: true")
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    if not isinstance(options, dict) or options.keys() - set(known):
        raise invalid("stream_options", "give an object with include_usage, continuous_usage_stats")
    if not all(isinstance(options.get(name), bool | None) for name in known):
        raise invalid("stream_options", "they are true or false")
    if options.get("include_obfuscation"):
        raise invalid("stream_options", "include_obfuscation is not supported")
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = given.get("tools"), given.get("tool_choice", "auto")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(x, dict) for x in tools)):
        raise invalid("tools", "give a list of functions")
    if any(x.get("type", "function") != "function" for x in tools or ()):
        raise invalid("tools", "functions only")
    if choice not in ("auto", "none"):
        raise invalid("tool_choice", f"give 'auto' or 'none', not {shown(choice)}: a call cannot be enforced")
    return tools if tools and choice == "auto" else None


def _template(given: Mapping[str, Any]) -> dict[str, Any]:
    found = given.get("chat_template_kwargs", {})
    if not isinstance(found, dict) or found.keys() & NOT_OF_TEMPLATES:
        raise invalid("chat_template_kwargs", "give an object of what the chat template reads")
    effort = given.get("reasoning_effort")
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, dict) or reasoning.keys() - {"effort"}:
        raise invalid("reasoning", "give an object with effort")
    effort = reasoning.get("effort", effort)
    return found | ({} if effort is None else {"reasoning_effort": effort})


def _continues(read: _Read, given: Mapping[str, Any], found: Asked) -> bool:
    """Whether the answer goes on from the last message. What the template reads of that is noted, too."""
    continues, header = read.flag("continue_final_message"), read.flag("add_generation_prompt")
    own = found.template.get("add_generation_prompt")
    if "add_generation_prompt" in given and own not in (None, header):
        raise invalid("add_generation_prompt", "chat_template_kwargs says something else: give one of the two")
    if not continues:
        if "add_generation_prompt" in given and not header:
            found.template["add_generation_prompt"] = False
        return False
    if header or own:
        raise invalid("continue_final_message", "with add_generation_prompt: true another message begins: give one")
    if found.form:
        why = f"an answer that is held to {found.form[0]} is so from its first token: leave out one of the two"
        raise invalid("continue_final_message", why)
    found.template.pop("add_generation_prompt", None)
    return True


def _form(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The field that says which JSON schema an answer has, and that; None: it is any text."""
    name = "text" if "text" in given else "response_format"
    form = _format(given["text"]) if name == "text" else given.get(name)
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return None
    if kind == "json_object":
        return name, {"type": "object"}
    if kind != "json_schema":
        raise invalid(name, f"{shown(kind)} is not supported: its type is 'text', 'json_object' or 'json_schema'")
    # In a chat the schema has an object of its own.
    within = form if name == "text" else form.get("json_schema")
    schema = within.get("schema") if isinstance(within, dict) else None
    if not isinstance(schema, dict):
        raise invalid(name, "json_schema is an object with a name and a schema")
    return name, schema


def _format(text: Any) -> Any:
    """The form of what a response says."""
    known = isinstance(text, dict) and not text.keys() - {"format", "verbosity"}
    if not known or text.get("verbosity") not in (None, "medium"):
        raise invalid("text", f"{shown(text)} is not supported: give an object with a format")
    return text.get("format")


#: Fields that say what is the case here anyway, and what they may be.
_ONLY: dict[str, Callable[[Any], bool]] = {
    "service_tier": lambda x: x in ("auto", "default"),
    "modalities": lambda x: x == ["text"],
    "parallel_tool_calls": lambda x: x is True,
    "truncation": lambda x: x == "disabled",
    "priority": lambda x: x == 0,
    # Nothing is stored that could be asked for later, and a client that says so is right.
    "store": lambda x: x is False,
    "background": lambda x: x is False,
    "metadata": lambda x: x == {},
    "include": lambda x: x == [],
    "functions": lambda x: x == [],
    "function_call": lambda x: x == "none",
    "previous_response_id": lambda x: False,
    "max_tool_calls": lambda x: False,
    "safety_identifier": lambda x: isinstance(x, str),
}


def _refuse(given: Mapping[str, Any]) -> None:
    for name, fits in _ONLY.items():
        if name in given and not fits(given[name]):
            raise invalid(name, f"{shown(given[name])} is not supported by this server")


def _check_completion(given: Mapping[str, Any], found: Asked) -> None:
    if _Read(given).whole("best_of", 1) not in (None, found.count):
        raise invalid("best_of", "it is not supported: all n answers are given")
    if given.get("suffix"):
        raise invalid("suffix", "it is not supported: write the prompt as the model was trained to fill in")
    echo = given.get("echo", False)
    if not isinstance(echo, bool) or (echo and found.logprobs):
        raise invalid("echo", "true or false; the prompt has no log-probabilities here")
