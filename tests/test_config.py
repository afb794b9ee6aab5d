"""Options are read as a user writes them; what cannot be honoured is refused with its name."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

import kvtier
from kvtier import ConfigError, TieredKVCache
from kvtier.config import MemoryOptions, format_size, parse_bytes, parse_size, resolve_size
from kvtier.cpu import loader
from kvtier.eviction.policies import names as eviction
from kvtier.eviction.policies.names import EvictionName
from kvtier.memory.storage import system
from kvtier.planning.policies import names as planning
from kvtier.planning.policies.names import PolicyName
from kvtier.scheduling.names import SCHEDULERS, SchedulerName
from kvtier.serving.engine import PREEMPTION
from kvtier.serving.runners.choice import RUNNERS

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [
        (1, 1),
        (4 * GIB, 4 * GIB),
        ("4GiB", 4 * GIB),
        (" 4 gib ", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 500 * 10**6),
        ("64 KiB", 65536),
        ("12b", 12),
        ("2TiB", 2 * 2**40),
        # As command lines and YAML files give it, and as numpy counts it.
        ("4000000", 4_000_000),
        ("4_000_000", 4_000_000),
        ("4", 4),
        ("4G", 4 * GIB),
        ("4g", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("4GB", 4 * 10**9),
        ("512M", 512 * 2**20),
        ("64k", 65536),
        (np.int64(5), 5),
        (np.uint8(5), 5),
    ],
    ids=repr,
)
def test_a_size_means_what_it_says(given: int | str, bytes_: int) -> None:
    assert parse_size("host_budget", given) == bytes_
    assert resolve_size("host_budget", parse_size("host_budget", given), free=7, reserve=3, reserve_share=0.5) == bytes_


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, False, None),
        *("", "4 parsecs", "-4GiB", "GiB", "0GiB", "0.1b", "4GiB please", b"4GiB", [4], "1e3GiB"),
        *("0", "1.5", "0%", "0.0", "101%", "%", "-1", "_4", "4__0", "4_", "1e9", "inf", "nan", "4,000", "0x10"),
        *(np.int64(0), np.float64(1.5), np.bool_(True), np.array([4]), torch.tensor(4)),
        *(2**63, 10**400, "8388608TiB", "4" * 400),
        pytest.param("4" * 5000, id="5000 digits"),
    ],
    ids=repr,
)
def test_what_is_not_a_size_is_refused_by_name(given: object) -> None:
    refusing = [lambda: parse_size("host_budget", given), lambda: kvtier.TieredMemory(host_budget=given)]
    if given is not None:  # for a cache None is the default
        refusing.append(lambda: TieredKVCache(host_budget=given))
    for refuse in refusing:
        with pytest.raises(ConfigError, match=r"host_budget.*give bytes.*'4GiB'.*'auto'"):
            refuse()


@pytest.mark.parametrize("given", ["0.25", "50%", 0.5, "auto", "4 parsecs", 0, None, -1])
def test_where_there_is_nothing_to_take_a_share_of_bytes_are_asked_for_by_the_same_rule(given: object) -> None:
    assert parse_bytes("x", "4G") == parse_bytes("x", "4G", zero=True) == parse_size("x", "4G") == 4 * GIB
    assert [parse_bytes("x", zero, zero=True) for zero in (0, "0", np.int64(0))] == [0, 0, 0]
    with pytest.raises(ConfigError) as refused:
        parse_bytes("x", given)
    rule = str(refused.value).partition("give bytes ")[2].rstrip(".")
    assert "'4GiB' and '4G' are powers of 1024" in rule
    with pytest.raises(ConfigError) as of_budget:
        parse_size("x", "4 parsecs")
    assert rule in str(of_budget.value)


@pytest.mark.parametrize("given", ["0.25", "25%", "25.0 %", np.float32(0.25), 0.25], ids=repr)
def test_a_share_is_written_as_a_fraction_or_in_percent(given: object) -> None:
    parsed = parse_size("host_budget", given)
    assert type(parsed) is float
    assert parsed == 0.25


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (2560, "2.5 KiB"),
        (10_000, "9.77 KiB"),
        (1023 * 1024, "1 MiB"),
        (2**20 - 1, "1 MiB"),
        (300 * 2**20, "300 MiB"),
        (5 * GIB + GIB // 4, "5.25 GiB"),
        (2000 * 2**40, "2000 TiB"),
    ],
)
def test_sizes_in_messages_have_three_digits_and_a_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text
    if size:
        assert 0.99 * size <= parse_size("x", text.replace(" bytes", "").replace(" byte", "")) <= 1.01 * size


def test_a_share_is_of_what_is_free_and_auto_leaves_the_larger_reserve() -> None:
    assert resolve_size("host_budget", parse_size("x", 0.25), free=1000, reserve=999, reserve_share=0.9) == 250
    assert resolve_size("host_budget", parse_size("x", 1.0), free=1000, reserve=999, reserve_share=0.9) == 1000
    auto = parse_size("x", " Auto ")
    assert resolve_size("host_budget", auto, free=1000, reserve=100, reserve_share=0.2) == 800
    assert resolve_size("host_budget", auto, free=1000, reserve=300, reserve_share=0.2) == 700
    with pytest.raises(ConfigError, match="'auto' leaves nothing"):
        resolve_size("host_budget", auto, free=200, reserve=300, reserve_share=0.2)


def test_devices_may_have_budgets_of_their_own_and_one_that_has_none_is_refused() -> None:
    options = MemoryOptions.parse({"cuda:0": "1GiB", "cuda:1": 0.5, "cpu": 77}, "auto")
    assert [options.device_size(d) for d in ("cuda:0", "cuda:1", "cpu")] == [GIB, 0.5, 77]
    with pytest.raises(ConfigError, match="cuda:2"):
        options.device_size("cuda:2")
    by_type = MemoryOptions.parse({"cuda": 5, "cuda:1": 6}, "auto")
    assert (by_type.device_size("cuda:0"), by_type.device_size("cuda:1")) == (5, 6)
    with pytest.raises(ConfigError, match="cuda:1"):
        MemoryOptions.parse({"cuda:0": 1, "cuda:1": "lots"}, "auto")


@pytest.mark.parametrize("names", [{"cdua:0": 1}, {"gpu": 1}, {"cuda:": 1}, {"cuda:x": 1}, {-1: 1}, {None: 1}, {}])
def test_a_mapping_that_names_no_device_is_refused_when_the_cache_is_made(names: dict[object, int]) -> None:
    with pytest.raises(ConfigError, match="names"):
        TieredKVCache(device_budget=names)


def test_devices_are_named_by_strings_by_torch_and_by_their_index() -> None:
    given = {0: "1KiB", np.int64(1): 2, torch.device("cuda", 2): 3, "CUDA:3": 4, torch.device("cpu"): 5}
    expected = {"cuda:0": 1024, "cuda:1": 2, "cuda:2": 3, "cuda:3": 4, "cpu": 5}
    assert MemoryOptions.parse(given, "auto").device_budget == expected
    for twice in ({0: 1, "cuda:0": 1}, {"cpu": 1, "cpu:0": 1}, {torch.device("cuda", 1): 1, 1: 2}):
        with pytest.raises(ConfigError, match="twice"):
            TieredKVCache(device_budget=twice)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_budget_beyond_the_machines_memory_is_warned_of_once_as_soon_as_it_is_known(
    tier: str, on_the_host: None
) -> None:
    total = system.total_host_memory()
    one = torch.ones(1, 1, 1, 8)
    for budget, beyond in ((total, False), (total + 1, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache = TieredKVCache(**{f"{tier}_budget": budget})
            # Which device the model is on is not known before its first forward.
            assert len(caught) == (beyond and tier == "host")
            for _ in range(2):
                cache.update(one, one, 0)
        assert len(caught) == beyond
        if beyond:
            assert all(str(n) in str(caught[0].message) for n in (total, total + 1, format_size(total)))
            assert caught[0].filename == __file__, "the line that asked for it"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if tier == "host":
                cache.resize(host_budget=budget)
        assert len(caught) == (beyond and tier == "host")
        cache.close()


@pytest.mark.parametrize("block_size", [0, -1, 2.0, "16", None, True, 2**63, 10**400])
def test_a_block_holds_a_whole_number_of_tokens(block_size: object) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        TieredKVCache(block_size=block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("write_through", [-0.1, 1.1, float("nan"), "0.5", True])
def test_write_through_is_a_share(write_through: object) -> None:
    with pytest.raises(ConfigError, match="write_through"):
        TieredKVCache(write_through=write_through)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("host_bugdet", "host_budget"),
        ("hostbudget", "host_budget"),
        ("gpu_budget", "device_budget"),
        ("cpu_budget", "host_budget"),
        ("ram_budget", "host_budget"),
        ("device_memory_budget", "device_budget"),
        ("Policy", "policy"),
        ("zzz", None),
    ],
)
def test_a_misspelt_option_names_the_nearest_one(given: str, nearest: str | None) -> None:
    model = SimpleNamespace(config=None, generate=None)
    for make in (
        TieredKVCache,
        kvtier.TieredMemory,
        kvtier.TieredMemory(host_budget=1).resize,
        partial(kvtier.ConversationStore, model),
        partial(kvtier.Engine, model),
        partial(kvtier.tiered, model),
        partial(kvtier.tier, model),
    ):
        with pytest.raises(kvtier.UnknownOptionError) as raised:
            make(**{given: 1})
        assert isinstance(raised.value, TypeError), "as Python says it"
        said = str(raised.value)
        assert f"has no option {given!r}." in said
        assert "host_budget" in said, "all options are listed"
        assert "self" not in said
        known = nearest is not None and nearest in said.partition("options are")[2]
        assert (f"Did you mean {nearest}?" in said) == known


def test_a_function_that_checks_its_options_is_the_one_it_was() -> None:
    assert list(inspect.signature(TieredKVCache).parameters)[:2] == ["config", "device_budget"]
    assert kvtier.tiered.__doc__.startswith("Give every")
    with pytest.raises(kvtier.UnknownOptionError, match="by their names"):
        kvtier.TieredMemory("4GiB")  # type: ignore[call-arg, misc]


def test_things_that_are_no_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="config"):
        TieredKVCache("4GiB")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["avx9", "AVX512 ", "torch"])
def test_an_instruction_set_that_is_not_there_is_refused_when_the_cache_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.VARIABLE, name)
    loader._load.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"{loader.VARIABLE}={name}"):
            TieredKVCache()
    finally:
        loader._load.cache_clear()
    monkeypatch.setenv(loader.VARIABLE, "none")
    TieredKVCache()
    loader._load.cache_clear()


@pytest.mark.parametrize(
    ("known", "names"),
    [(PolicyName, planning.POLICIES), (EvictionName, eviction.POLICIES), (SchedulerName, SCHEDULERS)],
)
def test_a_type_checker_knows_the_names_that_are_taken(known: object, names: dict[str, object]) -> None:
    assert get_args(known) == tuple(names)


@pytest.mark.parametrize(
    ("option", "names"), [("runner", RUNNERS), ("preemption", PREEMPTION)], ids=["runner", "preemption"]
)
def test_a_type_checker_knows_the_names_that_an_engine_takes(option: str, names: tuple[str, ...]) -> None:
    assert get_args(get_type_hints(kvtier.Engine.__init__)[option]) == names


def test_making_a_cache_loads_nothing_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    monkeypatch.setattr(loader, "_load", None)
    TieredKVCache()
