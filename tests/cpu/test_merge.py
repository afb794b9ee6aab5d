"""Parts merged by the library are those of `kernels.reference.merge`."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.cpu import native
from kvtier.errors import KVTierError
from kvtier.kernels import reference

Part = tuple[torch.Tensor, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_part(shape: tuple[int, ...], r: random.Random) -> Part:
    """out `[..., dim]`, lse `[...]`: random numbers in a random layout, some rows empty."""

    def tensor(*sizes: int) -> torch.Tensor:
        if len(sizes) == 1 or r.random() < 0.5:
            return torch.randn(sizes)
        some = torch.randn((*sizes[1:-1], sizes[0], sizes[-1] + 5))[..., 2:-3]
        return some.movedim(-2, 0)

    lse = tensor(*shape[:-1], 1)[..., 0] * r.choice((1.0, 30.0)) + r.choice(
        (0.0, 1e4, -1e4, torch.finfo(torch.float32).min)
    )
    out = tensor(*shape)
    empty = torch.rand(shape[:-1]) < 0.2
    return out.masked_fill(empty[..., None], 0.0) if r.random() < 0.5 else out.mul_(
        ~empty[..., None]
    ), lse.masked_fill_(empty, -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_parts_are_those_of_the_reference(isa: str, dtype: torch.dtype) -> None:
    for seed in range(150):
        r = random.Random(seed)
        torch.manual_seed(seed)
        dims = r.choice(((1, 4, 1), (2, 3, 5), (7, 4), (3,), (2, 0, 3), ()))
        shape = (*dims, r.choice((1, 7, 8, 16, 33, 64, 128)))
        parts = [random_part(shape, r) for _ in range(r.choice((1, 2, 2, 3, 20)))]
        right, right_lse = reference.merge(parts)
        around = torch.full((*dims, shape[-1] + 6), 77.0, dtype=dtype)
        out, lse = around[..., 3:-3], torch.full(dims, 77.0)
        assert native.merge(parts, out, r.choice((lse, lse, None))) is out
        torch.testing.assert_close(out, right.to(dtype), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
        assert bool((around[..., :3] == 77.0).all())
        assert bool((around[..., -3:] == 77.0).all())
        native.merge(parts, out, lse)
        torch.testing.assert_close(lse, right_lse, rtol=1e-6, atol=1e-5)


def test_merging_in_float32_is_as_exact_as_the_reference(isa: str) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(64, 128), torch.randn(64) * 3) for _ in range(4)]
    exact = reference.merge([(out.double(), lse.double()) for out, lse in parts])[0]
    theirs = float((reference.merge(parts)[0] - exact).abs().max())
    ours = float((native.merge(parts, torch.empty(64, 128)) - exact).abs().max())
    assert ours < 2 * theirs


@pytest.mark.parametrize(
    "values",
    [
        (-torch.inf, -torch.inf),
        (torch.inf, 0.0),
        (0.0, torch.nan),
        (torch.nan, -torch.inf),
        (torch.inf, torch.inf),
        (-torch.inf, torch.nan),
        (3.4e38, 3.4e38),
        (-3.4e38, -3.4e38),
        (0.0, -200.0),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "others", [(1.0, 2.0), (torch.nan, 2.0), (1.0, torch.nan), (torch.inf, 1.0), (1.0, -torch.inf)], ids=str
)
def test_what_is_not_finite_shows_where_the_reference_shows_it(
    isa: str, values: tuple[float, ...], others: tuple[float, ...]
) -> None:
    parts = [(torch.full((1, 2, 1, 40), x), torch.full((1, 2, 1), y)) for x, y in zip(others, values, strict=True)]
    for some in (parts, parts[::-1], parts[:1], parts[1:]):
        right, right_lse = reference.merge(some)
        out, lse = torch.empty(1, 2, 1, 40), torch.empty(1, 2, 1)
        native.merge(some, out, lse)
        torch.testing.assert_close(out, right, equal_nan=True)
        torch.testing.assert_close(lse, right_lse, equal_nan=True)


def test_parts_may_be_merged_into_the_first(isa: str) -> None:
    parts = [(torch.randn(2, 3, 1, 33), torch.randn(2, 3, 1)) for _ in range(3)]
    right, right_lse = reference.merge(parts)
    for _ in range(2):  # the second time repeats a prepared call
        some = [(out.clone(), lse.clone()) for out, lse in parts]
        native.merge(some, *some[0])
        torch.testing.assert_close(some[0][0], right)
        torch.testing.assert_close(some[0][1], right_lse)


def test_parts_that_do_not_fit_are_refused(kernel: None) -> None:
    out, lse = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1)
    part = (out, lse)

    def refused(parts: list[Part], out: torch.Tensor = out, lse: torch.Tensor | None = None) -> None:
        for _ in range(2):
            with pytest.raises(KVTierError, match="Merging"):
                native.merge(parts, out, lse)
            native.merge([part, part], torch.empty_like(part[0]))

    refused([])
    refused([part, (out[:1], lse[:1])])
    refused([part, (out.double(), lse)])
    refused([part, (out, lse.double())])
    refused([part, (out, lse[..., 0])])
    refused([part, (out.repeat(1, 1, 1, 2)[..., ::2], lse)])
    refused([part, (out.to("meta"), lse)])
    refused([part], torch.empty(2, 3, 1, 9))
    refused([part], out.double())
    refused([part], out, lse.double())
    refused([part], out, lse[:1])
    refused([(out[None], lse[None])], out[None])
