"""Merging parts: any partition gives the whole, and nothing is made of nothing."""

from __future__ import annotations

import random

import pytest
import torch
from problems import DTYPES, UNIT

from kvtier.errors import MismatchError
from kvtier.kernels import launch, paged, reference
from kvtier.kernels.forms import MergeForm

Part = tuple[torch.Tensor, torch.Tensor]


def pieces(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Part], Part]:
    """A random partition of the tokens of a softmax: its parts, some of them empty, and the whole in float64."""
    g, r = torch.Generator().manual_seed(number), random.Random(number)
    tokens, parts = r.randint(1, 30), r.randint(2, 6)
    scores = torch.randn((*shape[:-1], tokens), generator=g, dtype=torch.float64) * r.choice((0.1, 3.0, 30.0))
    values = torch.randn((*shape[:-1], tokens, shape[-1]), generator=g, dtype=torch.float64)
    place = torch.randint(0, parts, scores.shape, generator=g)

    def attend(scores: torch.Tensor) -> Part:
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        return (weights[..., None] * values).sum(-2), lse

    found = [attend(scores.masked_fill(place != part, -torch.inf)) for part in range(parts)]
    return [(out.to(dtype), lse.float()) for out, lse in found], attend(scores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_partition_merges_to_the_whole(dtype: torch.dtype, device: torch.device) -> None:
    for number in range(12):
        shape = random.Random(number).choice([(2, 3, 1, 64), (1, 2, 3, 17), (5, 2, 130), (7, 128), (1, 1, 2, 2, 8)])
        parts, (right, right_lse) = pieces(number, shape)
        out, lse = paged.merge([(x.to(device), y.to(device)) for x, y in parts], dtype=dtype)
        assert out.dtype == dtype
        plain, plain_lse = reference.merge(parts)
        torch.testing.assert_close(out.cpu().double(), right, rtol=2 * UNIT[dtype], atol=1e-4 * UNIT[dtype] + 4e-6)
        torch.testing.assert_close(out.cpu().float(), plain, rtol=2 * UNIT[dtype], atol=4e-6)
        torch.testing.assert_close(lse.cpu().double(), right_lse, rtol=1e-6, atol=4e-6)
        torch.testing.assert_close(lse.cpu(), plain_lse, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_in_a_half_dtype_and_results_anywhere_are_meant(dtype: torch.dtype, device: torch.device) -> None:
    parts, _ = pieces(3, (2, 3, 2, 24), dtype)
    parts = [(x.to(device), y.to(device)) for x, y in parts]
    plain, plain_lse = paged.merge(parts)
    apart = [(x.transpose(1, 2).contiguous().transpose(1, 2), y.mT.contiguous().mT) for x, y in parts]
    around = torch.full((2, 5, 3, 30), 7.0, dtype=dtype, device=device)
    target = around[:, 1:3, :, 2:26].transpose(1, 2)
    out, lse = paged.merge(apart, out=target)
    assert out is target
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    target.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.parametrize("parts", [2, 3, 63, 64, 65, 100, 128])
def test_any_number_of_parts_in_one_tensor_is_merged(parts: int, device: torch.device) -> None:
    g = torch.Generator().manual_seed(parts)
    outs, lses = torch.randn((parts, 1, 2, 1, 80), generator=g), torch.randn((parts, 1, 2, 1), generator=g) * 3
    lses[1::7] = -torch.inf
    outs[1::7] = torch.nan
    right, right_lse = reference.merge_stacked(outs.nan_to_num().double(), lses.double())
    # Behind the last part, what would be seen: its share is all there is.
    held, held_lse = torch.full((parts + 64, *outs.shape[1:]), torch.nan), torch.full((parts + 64, 1, 2, 1), 99.0)
    held[:parts], held_lse[:parts] = outs, lses
    out, lse = torch.empty(right.shape, device=device), torch.empty(right_lse.shape, device=device)
    held, held_lse = held.to(device), held_lse.to(device)
    result = (out.shape, out.dtype, 16, out.stride(), lse.stride())
    form = MergeForm(device, (held.dtype, 16), parts, (held.stride(0), held_lse.stride(0)), *result)
    form.launch(held, held_lse, out, lse)
    torch.testing.assert_close(out.cpu(), right.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), right_lse.float(), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(("parts", "launches"), [(2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_up_to_four_tensors_are_merged_by_one_launch_wherever_they_are(
    parts: int, launches: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(parts)
    given = [(torch.randn((2, 3, 24), generator=g), torch.randn((2, 3), generator=g) * 4) for _ in range(parts)]
    given[parts // 2][1][0] = -torch.inf
    given[parts // 2][0][0] = torch.nan
    counted: list[int] = []
    call = launch.Launcher.__call__
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, n, *args: counted.append(n) or call(self, n, *args))
    # In the order of their addresses, in the reverse one, and with one tensor given twice.
    orders = [sorted(given, key=lambda x: x[0].data_ptr()), given[:-1] + given[:1]]
    for some in (*orders, orders[0][::-1]):
        right, right_lse = reference.merge([(x.nan_to_num(), y) for x, y in some])
        out, lse = paged.merge([(x.to(device), y.to(device)) for x, y in some], dtype=dtype)
        torch.testing.assert_close(out.cpu().float(), right, rtol=2 * UNIT[dtype], atol=4e-6)
        torch.testing.assert_close(lse.cpu(), right_lse, rtol=1e-6, atol=4e-6)
    assert len(counted) == 3 * launches


def test_merging_nothing_changes_nothing(device: torch.device) -> None:
    out, lse = torch.randn((2, 3, 1, 8), device=device), torch.randn((2, 3, 1), device=device)
    # What an empty part holds does not matter.
    empty = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for parts in ([(out, lse)], [(out, lse), empty], [empty, (out, lse), empty]):
        merged, together = paged.merge(parts)
        assert torch.equal(merged, out)
        torch.testing.assert_close(together, lse, rtol=1e-6, atol=1e-7)
        assert not together.isnan().any()
    nothing, none = paged.merge([empty, empty])
    assert not nothing.count_nonzero()
    assert bool((none == -torch.inf).all())


def test_what_is_not_a_number_stays_in_its_row(device: torch.device) -> None:
    parts, _ = pieces(5, (1, 4, 2, 16))
    parts = [(x.to(device), y.to(device)) for x, y in parts]
    before, _ = paged.merge(parts)
    parts[1][1][0, 2, 1] = torch.nan
    after, lse = paged.merge(parts)
    assert bool(after[0, 2, 1].isnan().all())
    assert bool(lse[0, 2, 1].isnan())
    after[0, 2, 1] = before[0, 2, 1]
    assert torch.equal(after, before)


def test_shares_add_up_where_scores_are_the_lowest_number(device: torch.device) -> None:
    low = torch.finfo(torch.float32).min
    parts = [(torch.full((1, 8), x, device=device), torch.tensor([low], device=device)) for x in (1.0, 3.0)]
    out, lse = paged.merge(parts)
    assert torch.equal(out, torch.full((1, 8), 2.0, device=device))
    assert float(lse) == low


def test_parts_that_do_not_fit_are_refused(device: torch.device) -> None:
    out, lse = torch.zeros((2, 3, 8), device=device), torch.zeros((2, 3), device=device)
    for part in ((out[:1], lse[:1]), (out.half(), lse), (out, lse[:, :2])):
        with pytest.raises(MismatchError):
            paged.merge([(out, lse), part])
    for target in (out[:1], torch.empty((2, 3, 16), device=device)[..., ::2]):
        with pytest.raises(MismatchError):
            paged.merge([(out, lse)] * 2, out=target)
