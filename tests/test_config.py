"""Options are read as a user writes them; what cannot be honoured is refused with its name."""

from __future__ import annotations

import pytest

from kvtier import ConfigError, TieredKVCache
from kvtier.config import CacheOptions, parse_size, resolve_size

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
    ],
)
def test_a_size_means_what_it_says(given: int | str, bytes_: int) -> None:
    assert parse_size("host_budget", given) == bytes_
    assert resolve_size("host_budget", parse_size("host_budget", given), free=7, reserve=3, reserve_share=0.5) == bytes_


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, False, None),
        *("", "4", "4 parsecs", "-4GiB", "GiB", "0GiB", "0.1b", "4GiB please", b"4GiB", [4], "1e3GiB"),
    ],
    ids=repr,
)
def test_what_is_not_a_size_is_refused_by_name(given: object) -> None:
    with pytest.raises(ConfigError, match="host_budget"):
        parse_size("host_budget", given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host_budget"):
        TieredKVCache(host_budget=given)  # type: ignore[arg-type]


def test_a_share_is_of_what_is_free_and_auto_leaves_the_larger_reserve() -> None:
    assert resolve_size("host_budget", parse_size("x", 0.25), free=1000, reserve=999, reserve_share=0.9) == 250
    assert resolve_size("host_budget", parse_size("x", 1.0), free=1000, reserve=999, reserve_share=0.9) == 1000
    auto = parse_size("x", " Auto ")
    assert resolve_size("host_budget", auto, free=1000, reserve=100, reserve_share=0.2) == 800
    assert resolve_size("host_budget", auto, free=1000, reserve=300, reserve_share=0.2) == 700
    with pytest.raises(ConfigError, match="'auto' leaves nothing"):
        resolve_size("host_budget", auto, free=200, reserve=300, reserve_share=0.2)


def test_devices_may_have_budgets_of_their_own_and_one_that_has_none_is_refused() -> None:
    options = CacheOptions.parse({"cuda:0": "1GiB", "cuda:1": 0.5, "cpu": 77}, "auto", 16, 0)
    assert [options.device_size(d) for d in ("cuda:0", "cuda:1", "cpu")] == [GIB, 0.5, 77]
    with pytest.raises(ConfigError, match="cuda:2"):
        options.device_size("cuda:2")
    by_type = CacheOptions.parse({"cuda": 5, "cuda:1": 6}, "auto", 16, 0)
    assert (by_type.device_size("cuda:0"), by_type.device_size("cuda:1")) == (5, 6)
    with pytest.raises(ConfigError, match="cuda:1"):
        CacheOptions.parse({"cuda:0": 1, "cuda:1": "lots"}, "auto", 16, 0)


@pytest.mark.parametrize("block_size", [0, -1, 2.0, "16", None, True])
def test_a_block_holds_a_whole_number_of_tokens(block_size: object) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        TieredKVCache(block_size=block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("write_through", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_write_through_is_a_share(write_through: object) -> None:
    with pytest.raises(ConfigError, match="write_through"):
        TieredKVCache(write_through=write_through)  # type: ignore[arg-type]


def test_unknown_options_and_things_that_are_no_config_are_refused() -> None:
    with pytest.raises(TypeError):
        TieredKVCache(blocksize=16)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="config"):
        TieredKVCache("4GiB")  # type: ignore[arg-type]
