"""Prepared calls launch what plain calls launch, whatever changes from call to call, and refuse what those refuse."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_problems import Blocks, solved
from problems import Spec

from kvtier.errors import MismatchError
from kvtier.kernels import copies, launch, paged, reference
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

# The interpreter is numpy, which warns of what is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: What the driver would be handed: which launcher, how many programs, numbers and addresses.
Launch = tuple[int, int, list[Any]]
LAYOUT = BlockLayout(2, 2, 16, 32, 16, torch.bfloat16)


class Recorder:
    """In place of launches, notes. New tensors come from a pool, so that two calls get the same addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready = False
        self._launches: list[Launch] = []
        self._pool: dict[tuple[Any, ...], torch.Tensor] = {}
        self._taken = 0
        empty = torch.empty

        def pooled(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self._taken += 1
            key = (self._taken, *([shape] if isinstance(shape, int) else shape), dtype)
            if key not in self._pool:
                self._pool[key] = empty(shape, dtype=dtype, device=device)
            return self._pool[key]

        def noted(launcher: launch.Launcher, count: int, *args: Any) -> None:
            assert self.ready == all(not isinstance(x, torch.Tensor) for x in args)
            found = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
            self._launches.append((id(launcher), count, found))

        monkeypatch.setattr(torch, "empty", pooled)
        monkeypatch.setattr(launch.Launcher, "__call__", noted)
        monkeypatch.setattr(launch.Launcher, "ready", property(lambda launcher: self.ready))
        monkeypatch.setattr(launch, "_processors", lambda device: 132)

    def __call__(self, call: Callable[[], object], *, ready: bool) -> list[Launch]:
        """What a call launches; `ready`: as after the first launch of each program."""
        self._launches, self._taken, self.ready = [], 0, ready
        call()
        return self._launches


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, on_the_host: None) -> Iterator[Recorder]:
    if launch.available(torch.device("cpu")):
        yield Recorder(monkeypatch)
    else:
        pytest.skip("calls on the host launch nothing here")


def steps(r: random.Random, choices: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Of each thing, each value before each other one, while everything else stays; the rest is random."""
    for name, some in choices.items():
        values = list(dict.fromkeys(some))
        for before in values:
            for after in values:
                base = {other: r.choice(there) for other, there in choices.items()}
                yield base | {name: before}
                yield base | {name: after}


ATTENDED: dict[str, list[Any]] = {
    "rows": [1, 3],
    "queries": [1, 1, 2],
    "heads": [4, 4, 8],
    "as": ["contiguous", "contiguous", "transposed", "columns", "odd", "elsewhere"],
    "blocks": [1, 8, 32, 256],
    "width": [0, 3],
    "counts": [False, True],
    "positions": [False, True],
    "lengths": [15, 16, torch.int64, torch.int64, torch.int32],
    "ragged": [False, False, True],
    "max_queries": [None, 2, 1],
    "mask": [None, None, None, "row", "all", "float"],
    "first_valid": [None, None, torch.int64, torch.int32],
    "sinks": [None, None, True],
    "slopes": [None, None, True],
    "scale": [0.1, 0.1, 0.2],
    "softcap": [0.0, 0.0, 1.0, 2.0],
    "window": [0, 0, 5, 6],
    "causal": [False, True],
    "params": ["new", "same"],
}
_same: dict[Any, AttentionParams] = {}


def laid_out(shape: tuple[int, ...], how: str) -> torch.Tensor:
    """Zeros of a shape, in bf16."""
    if how == "contiguous":
        return torch.zeros(shape, dtype=torch.bfloat16)
    if how == "transposed":
        return torch.zeros((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype=torch.bfloat16).transpose(-3, -2)
    if how == "columns":
        return torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=torch.bfloat16).mT
    if how == "elsewhere":  # as if contiguous, at an odd address
        return torch.zeros((1 + torch.Size(shape).numel(),), dtype=torch.bfloat16)[1:].view(shape)
    return torch.zeros((*shape[:-1], 1 + shape[-1]), dtype=torch.bfloat16)[..., 1:]


def attended(x: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, with tensors of their own."""
    rows, queries, heads, blocks = x["rows"], x["queries"], x["heads"], x["blocks"]
    shape = (rows * queries, heads, 16) if x["ragged"] else (rows, heads, queries, 16)
    query = laid_out(shape, x["as"])
    wide = blocks + x["width"]
    table = AddressTable(
        torch.zeros((rows, wide), dtype=torch.int64)[:, :blocks],
        torch.zeros(rows, dtype=torch.int32) if x["counts"] else None,
        torch.zeros((rows, wide), dtype=torch.int32)[:, :blocks] if x["positions"] else None,
    )
    lengths = x["lengths"] if isinstance(x["lengths"], int) else torch.zeros(rows, dtype=x["lengths"])
    mask = None
    if x["mask"] is not None:
        mask = torch.zeros((1 if x["mask"] == "all" else rows, 1, queries, 16 + blocks), dtype=torch.bool)
        mask = mask.float() if x["mask"] == "float" else mask
    params = AttentionParams(
        x["scale"],
        x["softcap"],
        x["window"],
        x["causal"],
        mask,
        None if x["first_valid"] is None else torch.zeros(rows, dtype=x["first_valid"]),
        x["sinks"] and torch.zeros(heads),
        x["slopes"] and torch.zeros(heads),
    )
    if x["params"] == "same":
        names = ("scale", "softcap", "window", "causal", "mask", "first_valid", "sinks", "slopes", "rows", "heads")
        params = _same.setdefault(tuple(x[name] for name in (*names, "queries", "blocks")), params)
    more = {}
    if x["ragged"]:
        more = {"cu_queries": torch.zeros(rows + 1, dtype=torch.int32), "max_queries": x["max_queries"]}
    return (query, table, lengths, params), more


@pytest.mark.parametrize("seed", range(3))
def test_a_prepared_call_launches_what_a_plain_call_launches(seed: int, record: Recorder) -> None:
    prepared = paged.Prepared(LAYOUT, torch.bfloat16)
    fitted = 0
    fits = paged.AttendForm.fits
    for x in steps(random.Random(seed), ATTENDED):
        (query, table, lengths, params), more = attended(x)

        def plain(query: Any = query, table: Any = table, rest: Any = (lengths, params), more: Any = more) -> None:
            out = torch.empty((*query.shape[:-1], 32), dtype=torch.bfloat16, device=query.device)
            lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=query.device)
            paged.attend(query, table, LAYOUT, *rest, **more, out=out, lse=lse)

        if x["mask"] and x["ragged"] and 1 < x["queries"] < (x["max_queries"] or x["rows"] * x["queries"]):
            with pytest.raises(MismatchError):
                record(plain, ready=True)
            with pytest.raises(MismatchError):
                prepared(query, table, lengths, params, **more)
            continue
        right = record(plain, ready=False)
        assert len(right) in (1, 2)
        form = prepared._form
        fitted += form is not None and fits(
            form, query, table, lengths, params, more.get("cu_queries"), more.get("max_queries")
        )
        for ready in (True, False):
            assert record(lambda: prepared(query, table, lengths, params, **more), ready=ready) == right, x  # noqa: B023
    assert fitted > 50, "many calls are like the one before"


APPENDED: dict[str, list[Any]] = {
    "rows": [1, 3],
    "tokens": [1, 1, 2, 20],
    "keys": ["contiguous", "contiguous", "transposed", "odd", "columns", "elsewhere"],
    "values": ["contiguous", "contiguous", "transposed", "odd", "columns", "elsewhere"],
    "blocks": [2, 5],
    "starts": [0, 3, torch.int64, torch.int32],
    "ragged": [False, False, True],
}


@pytest.mark.parametrize("seed", range(3))
def test_a_prepared_append_launches_what_a_plain_append_launches(seed: int, record: Recorder) -> None:
    prepared = copies.PreparedAppend(LAYOUT)
    for x in steps(random.Random(seed), APPENDED):
        rows, tokens = x["rows"], x["tokens"]
        both = []
        for name, heads, dim in (("keys", 2, 16), ("values", 2, 32)):
            shape = (rows * tokens, heads, dim) if x["ragged"] else (rows, heads, tokens, dim)
            both.append(laid_out(shape, x[name]))
        addresses = torch.zeros((rows, x["blocks"]), dtype=torch.int64)
        starts = x["starts"] if isinstance(x["starts"], int) else torch.zeros(rows, dtype=x["starts"])
        more = {"cu_tokens": torch.zeros(rows + 1, dtype=torch.int32)} if x["ragged"] else {}
        given = (*both, addresses, LAYOUT, starts)
        right = record(lambda: copies.append(*given, **more), ready=False)  # noqa: B023
        assert len(right) == 1
        for ready in (True, False):
            made = record(lambda: prepared(*both, addresses, starts, **more), ready=ready)  # noqa: B023
            assert made == right, x


def test_decoding_through_prepared_calls_gives_the_same_bits(device: torch.device) -> None:
    layout = BlockLayout(2, 2, 16, 16, 4, torch.float32)
    g = torch.Generator().manual_seed(0)
    memory = torch.zeros((2, 8, layout.nbytes), dtype=torch.uint8, device=device)
    addresses = memory.data_ptr() + torch.arange(16, device=device).view(2, 8) * layout.nbytes
    attend, append = paged.Prepared(layout), copies.PreparedAppend(layout)
    held: list[list[torch.Tensor]] = [[], []]
    params = AttentionParams(0.25, causal=True)
    for step, tokens in enumerate((3, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1)):
        new = [torch.randn((2, 2, tokens, 16), generator=g).to(device) for _ in range(2)]
        query = torch.randn((2, 4, tokens, 16), generator=g).to(device)
        length = sum(x.shape[2] for x in held[0])
        for some, x in zip(held, new, strict=True):
            some.append(x)
        append(*new, addresses, length)
        length += tokens
        table = AddressTable(addresses[:, : -(-length // 4)].contiguous())
        out, lse = attend(query, table, length, params)
        plain, plain_lse = paged.attend(query, table, layout, length, params)
        assert torch.equal(out, plain), step
        assert torch.equal(lse, plain_lse), step
        right, _ = reference.attend(query, *(torch.cat(some, 2) for some in held), params)
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [False, True], ids=["first", "later"])
def test_what_does_not_fit_is_refused_by_prepared_calls_too(form: bool, device: torch.device) -> None:
    case, _ = solved(Spec(group=2, lengths=(40, 30)))
    blocks, params = Blocks(case, device), AttentionParams(1.0)
    query, table = case.query.to(device), blocks.table()
    attend = paged.Prepared(blocks.layout)
    good = {"query": query, "table": table, "lengths": 40, "params": params}
    wrong: list[dict[str, Any]] = [
        {"query": query[0]},
        {"query": query.half()},
        {"query": query[:1]},
        {"lengths": blocks.lengths[:1]},
        {"params": replace(params, first_valid=blocks.lengths[:1])},
        {"params": replace(params, sinks=torch.zeros(3, device=device))},
        {"params": replace(params, mask=torch.zeros((1, 1, 1, 39), device=device))},
        {"params": replace(params, mask=torch.zeros((1, 1, 2, 40), device=device))},
        {"cu_queries": torch.zeros(3, dtype=torch.int32, device=device)},
    ]
    for changes in wrong:
        before = {k: v for k, v in changes.items() if k != "params"}
        if "params" in changes:  # a form with such arguments, of the right size
            right = {"first_valid": blocks.lengths, "sinks": torch.zeros(4, device=device)}
            right["mask"] = torch.zeros((1, 1, 1, 40), device=device)
            names = [n for n in right if getattr(changes["params"], n) is not None]
            before = {"params": replace(params, **{n: right[n] for n in names})}
        elif "lengths" in changes:
            before = {"lengths": blocks.lengths}
        else:
            before = {}
        if form:
            attend(**good | before)
        with pytest.raises(MismatchError):
            attend(**good | changes)
    ends = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    if form:
        attend(query[:, :, 0], table, 40, params, cu_queries=ends)
    with pytest.raises(MismatchError):
        attend(query[:, :, 0], table, 40, params)


@pytest.mark.parametrize("form", [False, True], ids=["first", "later"])
def test_what_does_not_fit_is_refused_by_prepared_appends_too(form: bool, device: torch.device) -> None:
    layout = BlockLayout(2, 2, 8, 8, 16, torch.float32)
    keys, packed = torch.zeros((2, 2, 3, 8), device=device), torch.zeros((5, 2, 8), device=device)
    nowhere = torch.zeros((2, 5), dtype=torch.int64, device=device)
    starts, ends = (torch.zeros(n, dtype=t, device=device) for n, t in ((2, torch.int64), (3, torch.int32)))
    append = copies.PreparedAppend(layout)
    for before, wrong in (
        ((keys, keys, nowhere, 77), {"starts": 78}),
        ((keys, keys, nowhere, 77), {"starts": -1}),
        ((keys, keys, nowhere, 0), {"values": keys[:, :, :2]}),
        ((keys, keys, nowhere, 0), {"keys": keys.double(), "values": keys.double()}),
        ((keys, keys, nowhere, 0), {"addresses": nowhere.int()}),
        ((keys, keys, nowhere, starts), {"starts": starts[:1]}),
        ((keys, keys, nowhere, starts), {"starts": torch.zeros((2, 2), dtype=torch.int64, device=device)[:, 0]}),
        ((packed, packed, nowhere, starts, ends), {"cu_tokens": None}),
        ((packed, packed, nowhere, starts, ends), {"cu_tokens": ends[:2]}),
        ((packed, packed, nowhere, starts, ends), {"cu_tokens": ends.long()}),
    ):
        given = dict(zip(("keys", "values", "addresses", "starts", "cu_tokens"), before, strict=False))
        if form:
            append(**given)
        with pytest.raises(MismatchError):
            append(**given | wrong)


def test_no_mask_is_kept_alive(device: torch.device) -> None:
    case, _ = solved(Spec(group=2, lengths=(40, 30)))
    blocks = Blocks(case, device)
    attend = paged.Prepared(blocks.layout)
    mask = torch.zeros((1, 1, 1, 40), device=device)
    gone = weakref.ref(mask)
    attend(case.query.to(device), blocks.table(), 40, AttentionParams(1.0, mask=mask))
    del mask
    assert gone() is None


def test_an_empty_call_is_no_form(device: torch.device) -> None:
    case, _ = solved(Spec(group=2, lengths=(40, 30)))
    blocks = Blocks(case, device)
    attend, append = paged.Prepared(blocks.layout), copies.PreparedAppend(blocks.layout)
    none = AddressTable(torch.empty((0, 3), dtype=torch.int64, device=device))
    out, lse = attend(case.query[:0].to(device), none, 5, AttentionParams(1.0))
    assert (out.shape, lse.shape) == ((0, 4, 1, 64), (0, 4, 1))
    keys = torch.zeros((2, 2, 0, 64), device=device)
    append(keys, keys, blocks.table().addresses, 0)
    out, _ = attend(case.query.to(device), blocks.table(), blocks.lengths, case.params)
    plain, _ = paged.attend(case.query.to(device), blocks.table(), blocks.layout, blocks.lengths, case.params)
    assert torch.equal(out, plain)
