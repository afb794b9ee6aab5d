"""Every setting of `generate`: an engine gives what `generate` gives by it, or refuses it by its name."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_model
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import stopping_criteria, utils
from workloads import gaps_of, stream_of_tokens

from kvtier import BudgetError, ConfigError, Engine, UnsupportedError
from kvtier.hf.engine import sampling as sampling_module
from kvtier.hf.engine import stopping as stopping_module
from kvtier.hf.engine.sampling import Sampling

PROMPT = stream_of_tokens(1)[:12]
#: Of the plain greedy answer below, which is looked up when it is needed: a token that ends it, and the first one.
END, FIRST = "a token of the answer", "its first token"
#: Settings that change greedy tokens, and what is set with them.
GREEDY: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 20, "eos_token_id": END},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": END},
    "eos_token_id": {"eos_token_id": [END, 1]},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[FIRST], [FIRST, END]]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "suppress_tokens": {"suppress_tokens": [FIRST]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [FIRST]},
    "sequence_bias": {"sequence_bias": [[[7], 30.0], [[FIRST], -30.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 8.0), "eos_token_id": 9},
    "watermarking_config": {"watermarking_config": {"bias": 20.0, "greenlist_ratio": 0.2}},
}
#: Settings that change what is drawn, and not the likeliest token.
SAMPLED: dict[str, dict[str, Any]] = {
    "do_sample": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.4},
    "top_h": {"top_h": 0.3},
    "typical_p": {"typical_p": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "renormalize_logits": {"renormalize_logits": True, "top_k": 3},
}
#: Settings that ask for more than one sequence, token by token, or for what an engine does not give.
REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "use_mtp": True,
    "token_healing": True,
    "guidance_scale": 2.0,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_beam_groups": 2,
    "constraints": ["a"],
    "force_words_ids": [[5]],
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "cache_implementation": "quantized",
}
#: Of one sequence that is decoded token by token these change no token, and why.
NO_TOKEN: dict[str, str] = {
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty"), "of beams"),
    **dict.fromkeys(
        (
            *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "max_matching_ngram_size"),
            *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
            "assistant_ensemble_weight",
        ),
        "of an assistant",
    ),
    "low_memory": "of contrastive search",
    "decoder_start_token_id": "of an encoder-decoder",
    **dict.fromkeys(
        (
            *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"),
            "continuous_batching_config",
        ),
        "how it is computed, which an engine decides",
    ),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "there is no padding, and there is a prompt"),
    "return_dict_in_generate": "of what `generate` returns",
    **dict.fromkeys(("transformers_version", "_from_model_config", "_commit_hash"), "no setting"),
}
#: Tested by themselves below, or where text is.
ELSEWHERE = ("num_return_sequences", "max_time", "stop_strings", "remove_invalid_values", "forced_bos_token_id")


def generated(options: dict[str, Any], prompt: list[int] = PROMPT) -> Any:
    return tiny_model("llama").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **{"max_new_tokens": 10, "do_sample": False, **options},
    )


def by_engine(options: dict[str, Any], prompt: list[int] = PROMPT) -> list[int]:
    """The same by an engine, while other requests with settings of their own are computed."""
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        others = [{"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.5}]
        for other in others:
            engine.add_request(prompt[:5], **{"max_new_tokens": 12, "do_sample": False, **other})
        name = engine.add_request(prompt, **{"max_new_tokens": 10, "do_sample": False, **options})
        while engine.step():
            pass
        output = engine.output(name)
        assert output.error is None, output.error
        return output.generated_tokens
    finally:
        engine.close()


def filled(value: Any, tokens: list[int]) -> Any:
    """With the tokens of the plain answer in their places."""
    if isinstance(value, dict):
        return {key: filled(x, tokens) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(filled(x, tokens) for x in value)
    return {END: tokens[4], FIRST: tokens[0]}.get(value, value) if isinstance(value, str) else value


def plain() -> list[int]:
    tokens: list[int] = generated({}).sequences[0, len(PROMPT) :].tolist()
    assert tokens[4] not in tokens[:4], "the token that ends it comes earlier"
    return tokens


def test_every_setting_of_transformers_is_in_a_table() -> None:
    tables = (GREEDY, SAMPLED, REFUSED, NO_TOKEN, ELSEWHERE)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "a setting is in two tables"
    assert set(vars(GenerationConfig())) - set(names) == set(), "a setting that nobody has looked at"


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    before = plain()
    options = filled(GREEDY[name], before)
    out = generated(options)
    expected = out.sequences[0, len(PROMPT) :].tolist()
    without = {key: x for key, x in options.items() if key != name}
    assert expected != generated(without).sequences[0, len(PROMPT) :].tolist(), "it changes nothing"
    got, gaps = by_engine(options), gaps_of(out.scores)
    same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
    assert got == expected or gaps[same] < 1e-3, f"{got} {expected}"


@pytest.mark.parametrize("name", SAMPLED)
def test_what_is_drawn_from_is_what_generate_draws_from(name: str) -> None:
    model, options = tiny_model("llama"), {"do_sample": True, **SAMPLED[name]}
    torch.manual_seed(3)
    out = generated(options)
    tokens = out.sequences[0].tolist()
    sampling = Sampling(model, PROMPT, max_new_tokens=10, **options)
    changed = False
    for i, (raw, processed) in enumerate(zip(out.logits, out.scores, strict=True)):
        ids = tokens[: len(PROMPT) + i]
        assert torch.allclose(sampling.processed(ids, raw.float().clone()), processed, atol=1e-5)
        changed |= not torch.equal(raw, processed)
    assert changed or name == "do_sample", "it changes nothing"
    # What an engine draws is what may be drawn.
    drawn, ids = by_engine({**options, "seed": 5}), list(PROMPT)
    for token in drawn:
        raw = model(torch.tensor([ids])).logits[:, -1].float()
        assert torch.isfinite(sampling.processed(ids, raw)[0, token])
        ids.append(token)
    assert drawn == by_engine({**options, "seed": 5})
    assert drawn != by_engine({**options, "seed": 6}) or name in ("temperature", "min_p", "top_p", "typical_p", "top_h")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_its_name(name: str) -> None:
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        with pytest.raises(UnsupportedError, match=name):
            engine.add_request(PROMPT, max_new_tokens=4, **{name: REFUSED[name]})
        config = GenerationConfig(max_new_tokens=4)
        setattr(config, name, REFUSED[name])
        with pytest.raises(UnsupportedError, match=name):
            engine.add_request(PROMPT, config)
        assert not engine.load.waiting
    finally:
        engine.close()


def test_a_first_token_is_forced_behind_a_prompt_of_one() -> None:
    options = {"forced_bos_token_id": 5}
    expected = generated(options, [3]).sequences[0, 1:].tolist()
    assert expected[0] == 5
    assert by_engine(options, [3]) == expected


def test_scores_that_are_no_numbers_are_removed_where_that_is_asked_for() -> None:
    def spoils(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([4, 6]), float("nan"))

    options = {"remove_invalid_values": True, "logits_processor": [spoils]}
    assert by_engine(options) == generated(options).sequences[0, len(PROMPT) :].tolist()


def test_sequences_of_a_prompt_differ_and_each_can_be_had_again() -> None:
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        asked = {"do_sample": True, "seed": 3, "num_return_sequences": 3, "max_new_tokens": 8}
        first, again = (
            [x.generated_tokens for x in engine.generate_batch([PROMPT], **asked).values()] for _ in range(2)
        )
        assert len(first) == 3
        assert first == again
        assert len({tuple(each) for each in first}) == 3
    finally:
        engine.close()


def test_a_request_ends_when_its_time_is_over() -> None:
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        name = engine.add_request(PROMPT, max_new_tokens=10_000, max_time=0.2, do_sample=False)
        while engine.step():
            pass
        output = engine.output(name)
        assert output.finish_reason == "length"
        assert 0 < len(output.generated_tokens) < 10_000
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2, "do_sample": False},
        {"num_return_sequences": "2"},
        {"max_new_tokens": 0},
        {"max_new_tokens": "5"},
        {"temperature": 0.0, "do_sample": True},
        {"temperature": float("nan"), "do_sample": True},
        {"exponential_decay_length_penalty": (1,), "eos_token_id": 5},
    ],
    ids=str,
)
def test_what_transformers_does_not_take_is_a_config_error_of_its_request(options: dict[str, Any]) -> None:
    with pytest.raises(Exception) as own:  # noqa: PT011 - whatever it is
        tiny_model("llama").generate(torch.tensor([PROMPT]), **{"max_new_tokens": 3} | options)
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        with pytest.raises(ConfigError) as refused:
            engine.add_request(PROMPT, **{"max_new_tokens": 3} | options)
        assert str(own.value).splitlines()[0] in str(refused.value)
        assert not engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("end", [[None], ["a"], "a", {"a": 1}, [[1], [2, 3]]], ids=repr)
def test_an_end_that_is_no_token_is_refused(end: Any) -> None:
    needs = "eos_token_id=.*give a token id"
    with Engine(tiny_model("llama"), host_budget="16MiB") as engine, pytest.raises(ConfigError, match=needs):
        engine.add_request(PROMPT, eos_token_id=end)


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({}, {"eos_token_id": -1, "min_new_tokens": 2}),
        ({}, {"eos_token_id": [-1, -2]}),
        ({"eos_token_id": -1}, {}),
        ({"max_length": 50, "min_length": 9}, {"min_new_tokens": 2}),
        ({"max_length": 50, "max_new_tokens": 9}, {}),
    ],
    ids=str,
)
def test_requests_of_what_is_usual_log_nothing(
    own: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No end of an answer, and lengths in the place of the model's own: a server has that in each of its requests."""
    expected, model = generated({"max_new_tokens": 7}).sequences[0, LONG:].tolist(), tiny_model("llama")
    said = list[str]()
    for name, value in own.items():
        monkeypatch.setattr(model.generation_config, name, value)
    monkeypatch.setattr(utils.logger, "warning", said.append)
    with Engine(model, host_budget="16MiB", block_size=4) as engine:
        (output,) = engine.generate_batch([PROMPT], **{"max_new_tokens": 7, "do_sample": False} | options).values()
    assert (output.generated_tokens, output.finish_reason, said) == (expected, "length", [])


@pytest.mark.parametrize("end", [None, -1])
def test_a_penalty_of_the_end_needs_an_end(end: int | None) -> None:
    needs = "exponential_decay_length_penalty is of an eos_token_id"
    with Engine(tiny_model("llama"), host_budget="16MiB") as engine, pytest.raises(ConfigError, match=needs):
        engine.add_request(PROMPT, exponential_decay_length_penalty=(2, 1.5), eos_token_id=end)


def test_the_time_of_a_request_runs_from_when_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when its prompt was looked at, which a full queue keeps out."""
    now = [0.0]
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    for module in (stopping_module, stopping_criteria):
        monkeypatch.setattr(module, "time", clock)

    def tick(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # behind each token
        now[0] += 1
        return scores

    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4, max_waiting=1, max_running=1)
    options = {"max_new_tokens": 4, "max_time": 7.5, "logits_processor": [tick], "do_sample": False}
    try:
        outputs = engine.generate_batch([PROMPT] * 3, **options)
        # The second one waits for the first; the third one is added when the second one runs, and waits for that.
        assert [len(x.generated_tokens) for x in outputs.values()] == [4, 4, 4]
        name = engine.add_request(PROMPT, **options | {"max_new_tokens": 9})
        engine.wait(name)
        assert len(engine.output(name).generated_tokens) == 8
    finally:
        engine.close()


LONG = len(PROMPT)
#: Criteria of Transformers' own types, the settings whose place they take or not, and the reason of the end.
CRITERIA: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "more tokens than the default": ([MaxLengthCriteria(LONG + 25)], {"max_new_tokens": None}, "length"),
    "more tokens": ([MaxLengthCriteria(LONG + 25)], {"max_new_tokens": 5}, "length"),
    "fewer tokens": ([MaxLengthCriteria(LONG + 3)], {"max_new_tokens": 5}, "length"),
    "part of a token": ([MaxLengthCriteria(LONG + 3.5)], {"max_new_tokens": 5}, "length"),  # type: ignore[arg-type]
    "two lengths": ([MaxLengthCriteria(LONG + 9), MaxLengthCriteria(LONG + 7)], {"max_new_tokens": 5}, "length"),
    "no token": ([MaxLengthCriteria(LONG)], {"max_new_tokens": 5}, "length"),
    "another end": ([EosTokenCriteria(0)], {"eos_token_id": FIRST}, "stop"),
    "an end": ([EosTokenCriteria(0)], {}, "stop"),
    "more time": ([MaxTimeCriteria(1000)], {"max_time": 1e-9}, "length"),
    "no time": ([MaxTimeCriteria(1e-9)], {"max_time": 1000}, "length"),
    "of a type of its own": ([type("Own", (MaxLengthCriteria,), {})(LONG + 4)], {"max_new_tokens": 9}, "length"),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_of_the_type_of_a_setting_takes_its_place(name: str) -> None:
    given, options, reason = CRITERIA[name]
    tokens = plain()
    given = [EosTokenCriteria(tokens[4]) if isinstance(x, EosTokenCriteria) else x for x in given]
    options = {**filled(options, tokens), "stopping_criteria": given}
    expected = generated(options).sequences[0, LONG:].tolist()
    engine = Engine(tiny_model("llama"), host_budget="16MiB", block_size=4)
    try:
        several = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
        for more in ({"do_sample": False}, several):
            found = engine.generate_batch([PROMPT], **{"max_new_tokens": 10, **options, **more})
            for output in found.values():
                assert (output.generated_tokens, output.finish_reason) == (expected, reason)
    finally:
        engine.close()


def test_a_criterion_that_lets_a_sequence_grow_counts_for_what_fits() -> None:
    engine = Engine(tiny_model("llama"), host_budget="256KiB", block_size=4)
    try:
        engine.add_request(PROMPT, max_new_tokens=5)
        with pytest.raises(BudgetError, match="may grow to 1000000 "):
            engine.add_request(PROMPT, max_new_tokens=5, stopping_criteria=[MaxLengthCriteria(1_000_000)])
    finally:
        engine.close()


@pytest.mark.parametrize("number", [0, 1])
def test_criteria_of_users_have_ids_where_the_model_is(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(sampling_module, "device_of", lambda model: torch.device("meta"))
    monkeypatch.setattr(model, "_get_logits_processor", lambda **_: LogitsProcessorList())  # which looks at numbers
    seen = list[tuple[str, tuple[int, ...]]]()

    def sees(ids: torch.Tensor, scores: None) -> bool:
        seen.append((ids.device.type, tuple(ids.shape)))
        return False

    class OnHost:
        on_host = True

        def __call__(self, ids: torch.Tensor, scores: None) -> bool:
            assert ids.device.type == "cpu"
            return 7 in ids[0, LONG:].tolist()

    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "stopping_criteria": [sees, OnHost()]}
    sampling = Sampling(model, PROMPT, max_new_tokens=9, **options).each()[number]
    assert [sampling.ends([*PROMPT, *tokens]) for tokens in ([1], [1, 2], [1, 2, 7])] == ["", "", "stop"]
    assert seen == [("meta", (1, LONG + n)) for n in (1, 2, 3)]


def test_each_sequence_of_a_prompt_has_a_watermark_of_its_own() -> None:
    """Its processor keeps what it has seen of a sequence."""
    config = SynthIDTextWatermarkingConfig(keys=[7, 11, 13, 17], ngram_len=3)
    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "watermarking_config": config}
    name = engine.add_request([5, 9, 2], **options, seed=1, num_return_sequences=2)
    alone = [engine.add_request([5, 9, 2], **options, seed=seed) for seed in (1, 2)]
    while engine.step():
        pass
    for each, right in zip((name, f"{name}#1"), alone, strict=True):
        assert engine.output(each).generated_tokens == engine.output(right).generated_tokens
    engine.close()


def test_a_watermark_is_its_own_where_the_processor_of_another_request_raises() -> None:
    """Each processor sees a step once, whatever others do."""
    config = SynthIDTextWatermarkingConfig(keys=[7, 11, 13, 17], ngram_len=3)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "watermarking_config": config, "seed": 1}

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 6:
            raise RuntimeError("as told")
        return scores

    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    found = []
    for others in (0, 2):
        name = engine.add_request([5, 9, 2], **options)
        failing = [engine.add_request([8, 1, 2], max_new_tokens=9, logits_processor=[fail]) for _ in range(others)]
        while engine.step():
            pass
        found.append(engine.output(name).generated_tokens)
        assert [str(engine.output(x).error) for x in failing] == ["as told"] * others
    assert found[0] == found[1]
    engine.close()


class NeverAgain:
    """A processor that forbids the tokens that came of its calls, and a criterion that ends with the sixth of them."""

    def __init__(self) -> None:
        self.seen: list[int] | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> Any:
        if scores is None:
            return self.seen is not None and len(self.seen) >= 5
        self.seen = [] if self.seen is None else [*self.seen, int(ids[0, -1])]
        return scores.index_fill(1, torch.tensor(self.seen, dtype=torch.long), -torch.inf)


class Locked(NeverAgain):
    """One that has what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def both(made: NeverAgain) -> dict[str, Any]:
    return {"logits_processor": [made], "stopping_criteria": [made], "max_new_tokens": 9}


def test_what_a_processor_keeps_is_of_one_sequence_of_a_prompt() -> None:
    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    options: dict[str, Any] = {"do_sample": True, "temperature": 3.0}
    made = NeverAgain()
    name = engine.add_request(PROMPT, seed=1, num_return_sequences=3, **options, **both(made))
    alone = [engine.add_request(PROMPT, seed=seed, **options, **both(NeverAgain())) for seed in (1, 2, 3)]
    while engine.step():
        pass
    found = [engine.output(each).generated_tokens for each in (name, f"{name}#1", f"{name}#2")]
    assert found == [engine.output(each).generated_tokens for each in alone]
    assert all(len(set(tokens)) == 6 for tokens in found)
    assert made.seen == found[0][:-1], "the first sequence has the object that was given"
    engine.close()


def test_what_a_processor_keeps_is_of_one_prompt_of_a_batch() -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:]]
    # Room for one that waits: the others are added when the first one has begun.
    engine = Engine(tiny_model("llama"), host_budget="8MiB", max_waiting=1)
    found = [x.generated_tokens for x in engine.generate_batch(prompts, do_sample=False, **both(NeverAgain())).values()]
    for prompt, tokens in zip(prompts, found, strict=True):
        (alone,) = engine.generate_batch([prompt], do_sample=False, **both(NeverAgain())).values()
        assert tokens == alone.generated_tokens
        assert len(set(tokens)) == 6
    engine.close()


def test_what_cannot_be_copied_is_refused_where_there_are_several_sequences() -> None:
    with Engine(tiny_model("llama"), host_budget="8MiB") as engine:
        with pytest.raises(UnsupportedError, match=r"Locked cannot be copied.*Add a request for each sequence"):
            engine.add_request(PROMPT, do_sample=True, num_return_sequences=2, **both(Locked()))
        with pytest.raises(UnsupportedError, match="Locked cannot be copied"):
            engine.generate_batch([PROMPT, PROMPT], do_sample=False, **both(Locked()))
        assert not engine.load.waiting
        (output,) = engine.generate_batch([PROMPT], do_sample=False, **both(Locked())).values()
        assert len(output.generated_tokens) == 6


class OneOf:
    """A `prefix_allowed_tokens_fn` that allows one token in each row, and keeps the rows that it was asked for."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        assert not self.rows - {row}, "it is of one sequence"
        self.rows.add(row)
        return [10 + row]


def one_of(row: int, ids: torch.Tensor) -> list[int]:
    return [10 + row]


@pytest.mark.parametrize("count", [1, 3])
def test_what_says_which_tokens_are_allowed_hears_of_its_row(count: int) -> None:
    prompts = torch.tensor([PROMPT, PROMPT[::-1], PROMPT])
    options = {"max_new_tokens": 2, "do_sample": count > 1, "num_return_sequences": count}
    mask = torch.ones_like(prompts)
    out = tiny_model("llama").generate(prompts, attention_mask=mask, prefix_allowed_tokens_fn=one_of, **options)
    expected = out[:, len(PROMPT) :].tolist()
    with Engine(tiny_model("llama"), host_budget="8MiB") as engine:
        for function in (one_of, OneOf()):
            found = engine.generate_batch(prompts.tolist(), prefix_allowed_tokens_fn=function, **options)
            assert [each.generated_tokens for each in found.values()] == expected
        name = engine.add_request(PROMPT, prefix_allowed_tokens_fn=one_of, **options)
        assert engine.wait(name).generated_tokens == [10, 10]


def test_models_that_a_processor_has_are_not_copied() -> None:
    class Guided(NeverAgain):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model("llama")

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> Any:
            assert self.model is tiny_model("llama")
            return super().__call__(ids, scores)

    with Engine(tiny_model("llama"), host_budget="8MiB") as engine:
        outputs = engine.generate_batch([PROMPT, PROMPT[::-1]], do_sample=False, **both(Guided())).values()
        assert [x.finish_reason for x in outputs] == ["stop", "stop"]


def test_without_a_seed_requests_draw_by_torchs_generator() -> None:
    """As `generate` does: processes that have seeded it alike draw alike."""
    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 2}
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outputs = engine.generate_batch([PROMPT, PROMPT], **options).values()
        drawn.append([tuple(each.generated_tokens) for each in outputs])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4, "each sequence has numbers of its own"
    engine.close()


def test_the_tokens_that_processors_and_criteria_see_are_those_of_their_sequence() -> None:
    seen = dict[int, list[torch.Tensor]]()

    def sees(ids: torch.Tensor, scores: Any) -> Any:
        seen.setdefault(int(ids[0, 0]), []).append(ids)
        return False if scores is None else scores

    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    options: dict[str, Any] = {"logits_processor": [sees], "stopping_criteria": [sees], "do_sample": False}
    names = [engine.add_request([first, *PROMPT], max_new_tokens=20, **options) for first in (7, 8)]
    with torch.inference_mode():
        for _ in range(5):
            engine.step()
    while engine.step():
        pass
    for name in names:
        output = engine.output(name)
        assert output.error is None
        whole = output.prompt_ids + output.generated_tokens
        ends = [n for i in range(20) for n in (len(PROMPT) + 1 + i, len(PROMPT) + 2 + i)]
        assert [each.tolist() for each in seen[whole[0]]] == [[whole[:n]] for n in ends]
    engine.close()
