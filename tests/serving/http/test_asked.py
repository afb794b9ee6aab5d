"""Every field is honoured or refused with its name; nothing is ignored."""

from __future__ import annotations

import json
import math
import urllib.request
from typing import Any
from urllib.error import HTTPError

import openai
import pytest
from servers import NAME, Running, Start
from transformers import GenerationConfig

from kvtier.serving.http.handlers.responses import check_head, messages_from
from kvtier.serving.http.requests.asked import asked_of
from kvtier.serving.http.requests.messages import messages_of, prompts_of
from kvtier.serving.http.requests.refusals import Refusal

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", '"1"', "1" + "0" * 400 + ".0")
REFUSED: dict[str, list[Any]] = {
    "temperature": [10**400, 1e6, -1, "hot", True, [], math.inf],
    "top_p": [0, 1.1, "x"],
    "min_p": [-0.1, 2],
    "top_k": [1.5, -2],
    "n": [0, 129, 1.5, True],
    "seed": ["x", 1.5, 1 << 64],
    "stop": [5, [""], ["x"] * 17, [1], ""],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3],
    "logit_bias": [[], {"x": 1}, {"1": "x"}, {"1": 101}, {"-1": 1}, {"1" * 5000: 1}],
    "max_tokens": [0, -1, "x", 1.5],
    "stream": ["yes", 1],
    "stream_options": [{"other": 1}, [], {"include_usage": True}],
    "user": ["", 5, "x" * 300],
    "metadata": [{"a": "b"}],
    "store": [True],
    "service_tier": ["flex"],
    "priority": [5],
    "repetition_penalty": [0, -1, 1e-6, 1e6],
    "min_tokens": [-1],
    "ignore_eos": ["x"],
    "cache_salt": ["", 5],
    "generation_config": [
        *("{", [], {"num_return_sequences": 4}, {"stop_strings": ["x"]}, {"watermarking_config": 5}),
        # Arguments of the engine, and of others.
        *({"priority": 10**6}, {"priority": "high"}, {"tenant": "b"}, {"salt": "x"}, {"logits_processor": ["x"]}),
        *({"generation_config": {}}, {"listener": 1}, {"_from_model_config": True}, {"pad_token_id": "x"}),
        {"do_sample": True, "temperature": 1e-38},
        # By which scores would be no numbers of 32 bits.
        *(
            {"do_sample": True, "temperature": 1e39},
            {"repetition_penalty": 1e-50},
            {"encoder_repetition_penalty": 1e39},
        ),
        {"sequence_bias": [[[5], 1e39]]},
        # No numbers, or not of the kind that a setting is.
        *(f'{{"{name}": {x}}}' for name in ("top_p", "max_time", "min_length", "eos_token_id") for x in BAD_NUMBERS),
        *(f'{{"sequence_bias": [[[5], {x}]]}}' for x in BAD_NUMBERS),
        *({"do_sample": "no"}, {"do_sample": 1}, {"renormalize_logits": "yes"}, {"top_k": 1.5}, {"top_k": -1}),
        *({"eos_token_id": x} for x in (1.5, "2", True, [[1]], [1.0], {"1": 2})),
        *({"bad_words_ids": 5}, {"bad_words_ids": [["a"]]}, {"sequence_bias": [[[True], 1.0]]}),
        *(
            {"encoder_no_repeat_ngram_size": 257},
            {"no_repeat_ngram_size": -1},
            {"no_repeat_ngram_size": 257},
            {"suppress_tokens": "x"},
            {"suppress_tokens": 5},
        ),
        # What would change nothing here.
        *({"diversity_penalty": 1.0}, {"cache_implementation": "static"}, {"low_memory": True}, {"num_beams": 4}),
        *({"length_penalty": 2.0}, {"prefill_chunk_size": 8}, {"continuous_batching_config": {}}, {"use_cache": False}),
        # Deeper than Python reads, and more than a step should look at.
        *(DEEP, {"bad_words_ids": [[i, 1] for i in range(1025)]}, {"sequence_bias": [[[i], 1.0] for i in range(1025)]}),
        *({"bad_words_ids": [[5] * 4097, [6] * 4097]}, {"sequence_bias": [[[5] * 8193, 1.0]]}),
    ],
    "no_such_field": [1],
}
OF_CHAT: dict[str, list[Any]] = {
    "response_format": [
        5,
        {},
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
    ],
    "tool_choice": ["required", {"type": "function"}],
    "tools": [5, [5], [{"type": "web_search"}]],
    "parallel_tool_calls": [False],
    "modalities": [["audio"]],
    "top_logprobs": [21, 3],
    "functions": [[{"name": "f"}]],
    "chat_template_kwargs": [5, {"tokenize": False}],
    "messages": [
        None,
        [],
        "x",
        [5],
        [{"role": "user"}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}]}],
    ],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "best_of": [5, True, 1.0],
    "suffix": ["x"],
    "echo": ["x"],
    "logprobs": [-1, 21, True],
    "prompt": [None, [], 5, [1.5], [["x"]], {"x": 1}],
}
OF_RESPONSES: dict[str, list[Any]] = {
    "background": [True],
    "previous_response_id": ["x"],
    "include": [["x"]],
    "truncation": ["auto"],
    "text": [
        *({"verbosity": "high"}, {"verbosity": 5}, {"style": "x"}, 5, {"format": 5}, {"format": {"type": "grammar"}}),
        {"format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    ],
    "reasoning": [{"summary": "auto"}, 5],
    "instructions": [5, ["x"]],
    "input": [
        *(None, [], [5], [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "input_image"}]}]),
        [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}],
        [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c"}],
        [{"role": "user", "type": "reasoning"}],
    ],
}


def cases() -> list[tuple[str, str, Any]]:
    found = [("chat", name, value) for name, values in (REFUSED | OF_CHAT).items() for value in values]
    found += [("completions", name, value) for name, values in (REFUSED | OF_COMPLETIONS).items() for value in values]
    of_text = {"stop", "n", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "priority"}
    common = {name: values for name, values in REFUSED.items() if name not in of_text}
    return found + [("responses", name, x) for name, values in (common | OF_RESPONSES).items() for x in values]


@pytest.mark.parametrize(("kind", "name", "value"), cases())
def test_what_cannot_be_honoured_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    field = {"chat": "messages", "completions": "prompt", "responses": "input"}[kind]
    body = {field: body[field], name: value}
    with pytest.raises(Refusal) as refused:
        _read(kind, body)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith(name)


def _read(kind: str, body: dict[str, Any]) -> None:
    asked_of(kind, body)
    if kind == "chat":
        messages_of(body)
    if kind == "completions":
        prompts_of(body)
    if kind == "responses":
        messages_from(body)


@pytest.mark.parametrize("value", [1, 0, 1.0, "x", []])
@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats", "include_obfuscation"])
def test_what_a_stream_is_to_tell_is_true_or_false(name: str, value: Any) -> None:
    for taken in (False, None):
        asked_of("chat", {"stream": True, "stream_options": {name: taken}})
    with pytest.raises(Refusal, match="true or false"):
        asked_of("chat", {"stream": True, "stream_options": {name: value}})


def test_half_of_a_surrogate_pair_in_the_arguments_of_a_call_is_said_to_be_one() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"x": "\\ud83d\\ude00"}'}}]
    messages_of({"messages": [{"role": "assistant", "tool_calls": calls}]})
    calls[0]["function"]["arguments"] = '{"x": "\\ud83d"}'  # type: ignore[index]
    with pytest.raises(Refusal, match="surrogate"):
        messages_of({"messages": [{"role": "assistant", "tool_calls": calls}]})


def test_null_is_not_given() -> None:
    nothing = dict.fromkeys(
        (*REFUSED, *(x for x in OF_CHAT if x != "messages")),
    )
    assert asked_of("chat", nothing) == asked_of("chat", {})


def test_what_changes_nothing_is_taken() -> None:
    asked_of("chat", {"top_p": 1, "temperature": 0, "n": 1, "store": False, "tool_choice": "none", "metadata": {}})
    asked_of("completions", {"best_of": 1, "echo": False, "logit_bias": {}, "top_k": -1, "min_p": 0, "suffix": ""})
    for text in ({}, {"format": {"type": "text"}}, {"format": None, "verbosity": None}, {"verbosity": "medium"}):
        asked_of("responses", {"text": text})
    assert asked_of("chat", {"temperature": 0, "top_p": 1}).settings["do_sample"] is False
    assert asked_of("chat", {"top_p": 0.5}).settings == {"do_sample": True, "top_p": 0.5}


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-38, 1e-300])
def test_next_to_no_temperature_takes_the_likeliest_token(temperature: float) -> None:
    assert asked_of("chat", {"temperature": temperature}).settings == {"do_sample": False}


def test_a_generation_config_may_limit_the_answer() -> None:
    config = '{"max_new_tokens": 5, "temperature": 0.5, "do_sample": true}'
    asked = asked_of("chat", {"generation_config": config})
    assert (asked.max_tokens, asked.settings) == (5, {"temperature": 0.5, "do_sample": True})
    assert asked_of("chat", {"generation_config": config, "max_tokens": 7}).max_tokens == 7


def test_a_generation_config_as_transformers_writes_it_is_taken() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=20, max_new_tokens=5)
    asked = asked_of("chat", {"generation_config": config.to_json_string()})
    assert asked.max_tokens == 5
    assert asked.settings["temperature"] == 0.5
    assert "transformers_version" not in asked.settings


def test_settings_that_say_what_is_the_case_are_taken() -> None:
    plain = {"num_beams": 1, "use_cache": True, "low_memory": False, "length_penalty": 1.0, "guidance_scale": 1}
    asked_of("chat", {"generation_config": plain})
    own = {"bos_token_id": 1, "eos_token_id": [2, -1], "pad_token_id": 0, "exponential_decay_length_penalty": [3, 1.1]}
    assert asked_of("chat", {"generation_config": own}).settings == own


@pytest.mark.parametrize("name", ["begin_suppress_tokens", "eos_token_id", "suppress_tokens"])
def test_a_token_of_a_set_counts_once(name: str) -> None:
    assert asked_of("chat", {"generation_config": {name: [7, 5] * 5000}}).settings == {name: [7, 5]}


def test_sequences_of_tokens_have_so_many_ids_in_all() -> None:
    asked_of("chat", {"generation_config": {"bad_words_ids": [[5] * 4096, [6] * 4096]}})
    asked_of("chat", {"generation_config": {"sequence_bias": [[[5] * 8192, 1.0]]}})
    asked_of("chat", {"generation_config": {"sequence_bias": [[[i] * 8, 1.0] for i in range(1024)]}})
    with pytest.raises(Refusal, match=r"bad_words_ids: at most 1024 sequences .* 8192 .*, and it has 1, with 9000\.$"):
        asked_of("chat", {"generation_config": {"bad_words_ids": [[5] * 9000]}})


def test_a_session_is_named_by_the_most_telling_field() -> None:
    assert asked_of("chat", {"user": "u", "session_id": "s"}).session == "s"
    for kind in ("chat", "completions", "responses"):
        assert asked_of(kind, {"user": "u"}).session == "u"
        assert asked_of(kind, {"user": "u", "prompt_cache_key": "k"}).session == "k"


# ------------------------------------------------------------------------------------- over HTTP


def post(running: Running, path: str, data: bytes, **headers: str) -> tuple[int, dict[str, Any], Any]:
    request = urllib.request.Request(f"{running.url}{path}", data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer), answer.headers
    except HTTPError as error:
        return error.code, json.load(error), error.headers


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"{}", b'{"model": 5}', b"[" * 100000])
def test_a_malformed_request_is_a_4xx_that_says_why(running: Running, path: str, data: bytes) -> None:
    status, body, _ = post(running, path, data)
    assert 400 <= status < 500
    assert body["error"]["message"]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        *(
            ({k: v for k, v in CALL.items() if k != name}, f"has no {name}")
            for name in ("call_id", "name", "arguments")
        ),
        *(({k: v for k, v in RESULT.items() if k != name}, f"has no {name}") for name in ("call_id", "output")),
        ({**CALL, "call_id": None}, "has no call_id"),
        ({"type": "message", "content": "x"}, "has no role"),
        ({"content": "x"}, "has no role"),
        *(({"type": "reasoning", "content": x}, "each with a text") for x in ([{}], ["x"], "x", 5)),
    ],
)
def test_an_item_that_lacks_something_is_refused_with_what_and_where(item: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=rf"^input\[1\]: .*{says}\.$") as refused:
        messages_from({"input": [{"role": "user", "content": "x"}, item]})
    assert (refused.value.status, refused.value.param) == (400, "input")


def test_refusals_have_the_status_and_body_of_the_interface(running: Running) -> None:
    def asked(**body: Any) -> tuple[int, Any]:
        status, found, _ = post(running, "/completions", json.dumps({"prompt": "x", **body}).encode())
        return status, found["error"]

    status, error = asked(temperature=-1)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "temperature")
    status, error = asked(max_tokens=5000)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    status, error = asked(prompt="x " * 5000)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    for body in ({"max_tokens": 4}, {}):
        status, error = asked(min_tokens=17, **body)
        assert (status, error["param"]) == (400, "min_tokens")
    status, error = asked(prompt=[5000])
    assert (status, error["param"]) == (400, "prompt")
    status, error = asked(prompt="")
    assert (status, error["code"]) == (400, "empty_prompt")
    status, error = asked(generation_config={"num_beams": 4})
    assert status == 400
    status, error = asked(generation_config={"no_such_setting": 4})
    assert status == 400
    status, error = asked(logit_bias={"999999": 5})
    assert (status, error["param"]) == (400, "logit_bias")
    for name, ids in (
        ("bad_words_ids", [[5], [99999]]),
        ("suppress_tokens", [-1]),
        ("forced_bos_token_id", 10**9),
        ("eos_token_id", [1, 10**9]),
    ):
        status, error = asked(generation_config={name: ids})
        assert (status, error["param"]) == (400, name)
    status, error = asked(generation_config={"typical_p": 0.5})
    assert (status, error["param"]) == (400, "typical_p")
    assert "do_sample" in error["message"]
    status, body, _ = post(running, "/embeddings", b"{}")
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    status, body, _ = post(
        running, "/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [
            {"type": "function", "function": {"name": "f"}}]}).encode()
    )  # fmt: skip
    assert (status, body["error"]["param"]) == (400, "tools"), "the model's template reads none"
    assert running.engine.load.running == 0


def test_settings_that_bar_every_token_are_refused(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    barred = {"generation_config": {"begin_suppress_tokens": list(range(2048))}}
    status, body, _ = post(running, "/completions", json.dumps({"prompt": "x", "temperature": 1, **barred}).encode())
    assert (status, body["error"]["code"]) == (400, "invalid_value")
    assert "no token to draw" in body["error"]["message"]
    asked = running.client().completions.create
    parts = asked(model=NAME, prompt="x", temperature=1, stream=True, extra_body=barred)
    with pytest.raises(openai.APIError, match="no token to draw"):
        list(parts)
    assert not caplog.records, "what a client may not ask is no failure"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain; charset=utf-8", ""])
def test_a_body_of_another_type_is_told_which_one_is_read(running: Running, kind: str) -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    status, found, _ = post(running, "/completions", data, **{"Content-Type": kind})
    assert (status, found["error"]["code"]) == (400, "invalid_json")
    assert f"its Content-Type is {kind!r}. Send it with Content-Type: application/json." in found["error"]["message"]
    for read in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert post(running, "/completions", data, **{"Content-Type": read})[0] == 200


HALF = "\ud800"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": f"x{HALF}"}),
        ("/completions", {"prompt": "x", f"a{HALF}": 1}),
        ("/completions", {"prompt": "x", "stop": [f"{HALF}x"]}),
        ("/completions", {"prompt": "x", "generation_config": {HALF: 1}}),
        ("/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
        ("/responses", {"input": HALF}),
        ("/responses", {"input": "x", "instructions": HALF}),
    ],
)
def test_half_of_a_surrogate_pair_is_no_text(running: Running, path: str, body: dict[str, Any]) -> None:
    status, found, _ = post(running, path, json.dumps(body).encode())
    assert (status, found["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x\xed\xa0\x80"}',
        '{"prompt": "x\\ud800"}'.encode("utf-16"),
        '{"prompt": "x\\ud800"}'.encode("utf-16-le"),
        '{"prompt": "x\ud800"}'.encode("utf-32-be", "surrogatepass"),
    ],
)
def test_half_of_a_pair_is_no_text_in_any_encoding_of_json(running: Running, data: bytes) -> None:
    status, found, _ = post(running, "/completions", data)
    assert (status, found["error"]["code"]) == (400, "invalid_json")
    assert post(running, "/completions", '{"prompt": "x🙂", "max_tokens": 1}'.encode("utf-16"))[0] == 200


@pytest.mark.parametrize("data", [b'{"prompt": "\xff\xfe"}', b'{"prompt": "x\xc3"}'])
def test_bytes_that_are_no_text_are_said_to_be_none(running: Running, data: bytes) -> None:
    status, found, _ = post(running, "/completions", data)
    assert (status, found["error"]["code"]) == (400, "invalid_json")
    assert "its bytes are no text: 'utf-8' codec can't decode byte" in found["error"]["message"]


def test_a_whole_pair_of_surrogates_is_text(running: Running) -> None:
    status, _, _ = post(running, "/completions", b'{"prompt": "\\ud83d\\ude00 \\\\ud800", "max_tokens": 1}')
    assert status == 200


@pytest.mark.parametrize("tool", [{"type": "function"}, {"type": "function", "name": 5}, {"function": {"name": "f"}}])
def test_a_tool_that_no_response_can_repeat_is_refused(tool: Any) -> None:
    head = {"created_at": 1.0, "model": NAME, "object": "response", "parallel_tool_calls": True, "tool_choice": "auto"}
    right = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    check_head(head | {"tools": [right]})
    with pytest.raises(Refusal) as refused:
        check_head(head | {"tools": [right, tool]})
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_an_answer_of_no_stated_length_that_does_not_fit_says_what_to_give(start: Start) -> None:
    with start(store={"host_budget": "1500KiB", "block_size": 16}) as running:
        body = {"messages": [{"role": "user", "content": "x"}]}
        status, found, _ = post(running, "/chat/completions", json.dumps(body).encode())
        assert (status, found["error"]["param"]) == (400, "max_tokens")
        assert post(running, "/chat/completions", json.dumps(body | {"max_tokens": 4}).encode())[0] == 200


def test_a_client_that_sends_all_of_a_large_body_reads_that_it_is_too_large(start: Start) -> None:
    with start(max_body=1 << 20) as running:
        status, body, _ = post(running, "/completions", b'{"prompt": "' + b"x" * (4 << 20) + b'"}')
        assert (status, body["error"]["code"]) == (413, "request_too_large")


def test_a_large_body_is_refused_before_it_is_read(start: Start) -> None:
    with start(max_body=10_000) as running:
        status, body, headers = post(running, "/completions", b'{"prompt": "' + b"x" * 20_000 + b'"}')
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert headers["Connection"] == "close"
        status, _, _ = post(running, "/completions", b'{"prompt": "x", "max_tokens": 1}')
        assert status == 200


def test_what_could_never_fit_is_refused_and_the_next_one_is_answered(start: Start) -> None:
    with start(store={"host_budget": "1500KiB", "block_size": 16}) as running:
        status, body, _ = post(running, "/completions", json.dumps({"prompt": "x y" * 900, "max_tokens": 9}).encode())
        assert (status, body["error"]["code"]) == (400, "budget_exceeded")
        assert post(running, "/completions", b'{"prompt": "x", "max_tokens": 2}')[0] == 200


def test_the_models_that_are_listed_are_those_that_are_served(running: Running) -> None:
    with urllib.request.urlopen(f"{running.url}/models") as answer:
        (entry,) = json.load(answer)["data"]
    assert entry["id"] == NAME
    assert entry["max_model_len"] == 4096


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{NAME}", "/health", "/metrics"])
def test_whether_it_is_there_can_be_asked_without_a_body(running: Running, path: str) -> None:
    url = running.url.removesuffix("/v1") + path
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
        assert (answer.status, answer.read()) == (200, b"")
    with urllib.request.urlopen(url) as answer:
        assert answer.read()


@pytest.mark.parametrize("asked", [{"temperature": 1e5}, {"temperature": 1e-5}, {"repetition_penalty": 1e-5}])
def test_what_is_taken_leaves_scores_that_can_be_drawn_from(running: Running, asked: dict[str, float]) -> None:
    body = {"prompt": "x", "max_tokens": 4, "min_tokens": 4, "temperature": 1.0, "repetition_penalty": 1e5, **asked}
    status, found, _ = post(running, "/completions", json.dumps(body).encode())
    assert (status, found["usage"]["completion_tokens"]) == (200, 4)


def test_a_method_that_a_path_does_not_take_is_told_those_it_takes(running: Running) -> None:
    for path, method, takes in (("/health", "POST", {"GET", "HEAD"}), ("/v1/completions", "GET", {"POST"})):
        url = running.url.removesuffix("/v1") + path
        with pytest.raises(HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, method=method))
        assert (refused.value.code, set(refused.value.headers["Allow"].split(", "))) == (405, takes)
        assert refused.value.headers["Allow"] in json.load(refused.value)["error"]["message"]


def test_whoever_asks_to_load_a_model_names_one(running: Running) -> None:
    for body in (b'{"model": 5}', b"{}", b"[]"):
        with pytest.raises(HTTPError) as refused:
            _sent(running, "/load_model", body)
        assert (refused.value.code, bool(json.load(refused.value)["error"]["message"])) == (400, True)
    for name, said in ((NAME, "ready"), ("other", "error")):
        found = _sent(running, "/load_model", json.dumps({"model": name}).encode())
        assert json.loads(found.removeprefix("data: "))["status"] == said


def _sent(running: Running, path: str, body: bytes) -> str:
    url, headers = running.url.removesuffix("/v1") + path, {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
        return str(answer.read(), "utf-8")


def test_an_event_of_a_response_is_named_before_its_data(running: Running) -> None:
    found = _sent(running, "/v1/responses", b'{"input": "x", "max_output_tokens": 2, "stream": true}')
    events = found.removesuffix("\n\n").split("\n\n")
    assert len(events) > 6
    for event in events:
        name, data = event.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        assert isinstance(said.get("response", {}).get("created_at", 0), int)
