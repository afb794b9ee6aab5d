"""Random problems of decode attention: their numbers in memory, what torch makes of them, and the right answer."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import random
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.cpu import native
from kvtier.errors import ConfigError
from kvtier.kernels.params import AttentionParams

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = 0xFF  # as every byte of a number, in each of the three dtypes
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step of the mantissa
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}


def instruction_sets() -> list[str]:
    """Those that this CPU can run, the best last."""
    if not native.available():
        return []
    before, found = native.instruction_set(), []
    for name in ("portable", "neon", "avx2", "avx512", "avx512_bf16", "amx_bf16"):
        try:
            native.use_instruction_set(name)
        except ConfigError:
            continue
        found.append(name)
    native.use_instruction_set(before)
    return found


@dataclass(frozen=True)
class Spec:
    """What is asked; the kernel branches on every field."""

    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 1
    queries: int = 1
    k_dim: int = 64
    v_dim: int = 64
    block_size: int = 16
    lengths: tuple[int, ...] = (100,)
    first_valid: tuple[int, ...] | None = None
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    mask: torch.dtype | None = None
    shared: tuple[bool, bool, bool] = (False, False, False)  # the mask is broadcast in batch, heads, queries
    out_dtype: torch.dtype | None = None
    scattered: bool = False  # query and out are slices of something larger
    sharpness: float = 1.0  # standard deviation of the scores, about
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def random_spec(number: int, dtype: torch.dtype) -> Spec:
    """The spec of that number: always the same, and each combines a few unusual things."""
    r = random.Random(f"{number} {dtype}")
    k_dim = r.choice((64, 64, 80, 96, 128, 128, 256, 17, 33, 8, 1))
    queries = r.choice((1, 1, 1, 2, 3, 4, 5, 8, 16))
    batch = r.choice((1, 1, 2, 3))
    lengths = tuple(max(1, round(2 ** r.uniform(0, 10.5))) for _ in range(batch))
    # In a model there are never more queries than tokens.
    lengths = tuple(max(length, queries) for length in lengths)
    rare = r.random
    return Spec(
        dtype=dtype,
        kv_heads=r.choice((1, 1, 2, 3, 8)) if queries < 8 else r.choice((1, 2)),
        group=r.choice((1, 2, 3, 4, 5, 8, 16)),
        queries=queries,
        k_dim=k_dim,
        v_dim=k_dim if rare() < 0.7 else r.choice((64, 128, 256, 80, 96, 17, 33, 1)),
        block_size=r.choice((1, 2, 7, 15, 16, 17, 64, 256, 300, 511, 512, 513, 1024)),
        lengths=lengths,
        # A query that sees nothing is part of it.
        first_valid=tuple(r.randint(0, n) for n in lengths) if rare() < 0.25 else None,
        causal=rare() < (0.7 if queries > 1 else 0.3),
        window=r.choice((1, 2, 5, 31, 250, 257, 5000)) if rare() < 0.3 else 0,
        softcap=r.choice((0.5, 5.0, 30.0)) if rare() < 0.2 else 0.0,
        sinks=rare() < 0.2,
        slopes=rare() < 0.2,
        mask=r.choice((torch.bool, *DTYPES)) if rare() < 0.4 else None,
        shared=(rare() < 0.5, rare() < 0.5, rare() < 0.5),
        out_dtype=dtype if rare() < 0.7 else r.choice(DTYPES),
        scattered=rare() < 0.3,
        sharpness=r.choice((0.0, 0.3, 1.0, 1.0, 3.0, 10.0)),
        seed=number,
    )


@dataclass
class Exact:
    """The answer for one sequence in float64, and what it is sensible to expect of fp32 arithmetic."""

    out: torch.Tensor  # [heads, queries, v_dim]
    lse: torch.Tensor  # [heads, queries]
    size: torch.Tensor  # [heads, queries, v_dim] weighted sum of |values|: errors of weights are relative to it
    blur: torch.Tensor  # [heads, queries, 1] bound of the error of one score in fp32
    step: torch.Tensor  # [heads, queries, 1] error of a score that is right but for its own rounding to fp32
    theirs: torch.Tensor  # [heads, queries, v_dim] what torch makes of it in the dtype


@dataclass
class Case:
    """A spec filled with numbers. Everything that must not be read is NaN."""

    spec: Spec
    query: torch.Tensor = field(init=False)  # [batch, heads, queries, k_dim]
    keys: list[torch.Tensor] = field(init=False)  # of each sequence: [kv_heads, length, k_dim]
    values: list[torch.Tensor] = field(init=False)
    params: AttentionParams = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        g = torch.Generator().manual_seed(spec.seed)
        batch = len(spec.lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g)

        query = normal(batch, spec.queries, spec.heads, spec.k_dim + 3).to(spec.dtype)
        self.query = query[..., 2:-1].transpose(1, 2)
        if not spec.scattered:
            self.query = self.query.contiguous()
        self.keys = [normal(spec.kv_heads, n, spec.k_dim).to(spec.dtype) for n in spec.lengths]
        self.values = [normal(spec.kv_heads, n, spec.v_dim).to(spec.dtype) for n in spec.lengths]
        self.params = AttentionParams(
            scale=spec.sharpness / spec.k_dim**0.5,
            softcap=spec.softcap,
            window=spec.window,
            causal=spec.causal,
            mask=None if spec.mask is None else self._mask(g),
            first_valid=None if spec.first_valid is None else torch.tensor(spec.first_valid),
            sinks=normal(spec.heads) * 3 if spec.sinks else None,
            slopes=torch.rand(spec.heads, generator=g) if spec.slopes else None,
        )

    def _mask(self, g: torch.Generator) -> torch.Tensor:
        spec = self.spec
        full = (len(spec.lengths), spec.heads, spec.queries)
        shape = [1 if shared else n for shared, n in zip(spec.shared, full, strict=True)]
        longest = max(spec.lengths)
        seen = torch.rand((*shape, longest + 5), generator=g) < 0.7
        seen[..., : longest // 3] &= torch.rand(shape, generator=g)[..., None] < 0.8
        assert spec.mask is not None
        if spec.mask == torch.bool:
            mask = seen
        else:
            bias = torch.randn(seen.shape, generator=g)
            hidden = torch.where(torch.rand(seen.shape, generator=g) < 0.5, -torch.inf, torch.finfo(spec.mask).min)
            mask = torch.where(seen, bias, hidden).to(spec.mask)
        mask[..., longest:] = True if spec.mask == torch.bool else torch.nan
        return mask if spec.seed % 2 else mask[..., :longest]  # rows may be longer than the sequence

    def exact(self, s: int) -> Exact:
        """Sequence `s` in float64, by plain operations."""
        spec, params, u = self.spec, self.params, UNIT[torch.float32]
        q = self.query[s].double()
        k = self.keys[s].double().repeat_interleave(spec.group, 0)
        v = self.values[s].double().repeat_interleave(spec.group, 0)
        scores = q @ k.mT * params.scale
        products = q.abs() @ k.abs().mT * params.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        at, position, seen = self.geometry(s)
        if params.slopes is not None:
            scores = scores + params.slopes.double()[:, None, None] * (position - at)
        extra = self.mask_of(s)
        if extra is not None:
            scores = scores.masked_fill(~extra, -torch.inf) if extra.dtype == torch.bool else scores + extra.double()
        scores = scores.masked_fill(~seen, -torch.inf)
        every = scores
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, spec.queries, 1)
            every = torch.cat([scores, sinks], -1)
        lse = every.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        felt = weights > 1e-30
        # A dot product's rounding grows with the root of its length; scale, cap, bias and mask round once each.
        blur = 2 * u * spec.k_dim**0.5 * products.abs() + 4 * u * scores.abs() + 8 * u * min(spec.softcap, 1e9)
        blur, step = (torch.where(felt, x, 0.0).amax(-1, keepdim=True) for x in (blur, u * scores.abs()))
        return Exact(weights @ v, lse, weights @ v.abs(), blur, step, self.by_torch(s))

    def geometry(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions of the queries `[queries, 1]` and keys `[tokens]` of sequence `s`, and which see which."""
        spec, n = self.spec, self.spec.lengths[s]
        at, position = torch.arange(n - spec.queries, n)[:, None], torch.arange(n)
        seen = torch.ones((spec.queries, n), dtype=torch.bool)
        if spec.causal:
            seen &= position <= at
        if spec.window:
            seen &= position > at - spec.window
        if spec.first_valid is not None:
            seen &= position >= spec.first_valid[s]
        return at, position, seen

    def mask_of(self, s: int) -> torch.Tensor | None:
        mask = self.params.mask
        if mask is None:
            return None
        return mask[s if mask.shape[0] > 1 else 0, ..., : self.spec.lengths[s]]

    def by_torch(self, s: int) -> torch.Tensor:
        """What torch makes of sequence `s` in its dtype: `[heads, queries, v_dim]`; NaN where nothing is seen."""
        spec, params = self.spec, self.params
        q, k, v = self.query[s], self.keys[s], self.values[s]
        at, position, seen = self.geometry(s)
        bias = self.mask_of(s)
        if not (spec.softcap or spec.sinks or spec.slopes) and (bias is None or bias.dtype in (torch.bool, q.dtype)):
            if bias is None or bias.dtype == torch.bool:
                mask = (seen if bias is None else seen & bias).expand(spec.heads, -1, -1)
            else:
                mask = bias.masked_fill(~seen, -torch.inf).expand(spec.heads, -1, -1)
            args = (q[None], k[None], v[None], mask[None])
            return scaled_dot_product_attention(*args, scale=params.scale, enable_gqa=True)[0]
        scores = q @ k.repeat_interleave(spec.group, 0).mT * params.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if params.slopes is not None:
            scores = scores + (params.slopes[:, None, None] * (position - at)).to(q.dtype)
        if bias is not None:
            scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        scores = scores.masked_fill(~seen, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.to(scores.dtype)[:, None, None].expand(-1, spec.queries, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : spec.lengths[s]].to(q.dtype)
        return weights @ v.repeat_interleave(spec.group, 0)


Run = tuple[int, int, int]  # (address, index, count)


class Paged:
    """A case's keys and values in blocks, with NaN between slots and behind each sequence.

    Chunks of neighbouring slots are in random order, so that there are runs of one block and of several.
    """

    def __init__(self, case: Case) -> None:
        spec = case.spec
        self.shape = native.Shape(spec.dtype, spec.kv_heads, spec.k_dim, spec.v_dim, spec.block_size)
        self.random = random.Random(spec.seed)
        size = spec.block_size
        key_count, value_count = spec.kv_heads * size * spec.k_dim, spec.kv_heads * size * spec.v_dim
        stride = key_count + value_count + 16
        counts = [-(-n // size) for n in spec.lengths]
        order = self._order(counts)
        element = spec.dtype.itemsize
        self.stride = stride * element
        self.memory = torch.full(((sum(counts) * stride + 16) * element,), NAN, dtype=torch.uint8).view(spec.dtype)
        self.addresses: list[list[int]] = []
        for keys, values, slots in zip(case.keys, case.values, order, strict=True):
            row = []
            for index, slot in enumerate(slots):
                start = slot * stride + 16
                block = self.memory[start : start + key_count + value_count]
                n = min(size, keys.shape[1] - index * size)
                part = slice(index * size, index * size + n)
                block[:key_count].view(spec.kv_heads, size, spec.k_dim)[:, :n] = keys[:, part]
                block[key_count:].view(spec.kv_heads, size, spec.v_dim)[:, :n] = values[:, part]
                row.append(block.data_ptr())
            self.addresses.append(row)
        self.lengths = list(spec.lengths)

    def _order(self, counts: list[int]) -> list[list[int]]:
        """A slot for each block of each row."""
        chunks: list[tuple[int, int, int]] = []  # row, first index, blocks
        for row, count in enumerate(counts):
            index = 0
            while index < count:
                n = min(self.random.choice((1, 1, 2, 5, 40)), count - index)
                chunks.append((row, index, n))
                index += n
        self.random.shuffle(chunks)
        order = [[0] * count for count in counts]
        slot = 0
        for row, index, n in chunks:
            order[row][index : index + n] = range(slot, slot + n)
            slot += n
        return order

    def runs(self, row: int, indices: list[int], cut: float) -> list[Run]:
        """Runs over these blocks of a row: neighbours are joined, but for a share `cut` of the places between them."""
        runs: list[Run] = []
        for index in indices:
            address = self.addresses[row][index]
            if runs:
                start, first, count = runs[-1]
                if index == first + count and address == start + count * self.stride and self.random.random() >= cut:
                    runs[-1] = (start, first, count + 1)
                    continue
            runs.append((address, index, 1))
        return runs

    def sequences(self, chosen: list[list[int]] | None = None, *, cut: float | None = None) -> native.Sequences:
        """All blocks, or of each sequence only those with the chosen indices."""
        if chosen is None:
            chosen = [list(range(len(row))) for row in self.addresses]
        if cut is None:
            cut = self.random.choice((0.0, 0.3, 1.0))
        sequences = native.Sequences(len(chosen), self.stride, keep=self.memory)
        for row, indices in enumerate(chosen):
            sequences.set_runs(row, self.runs(row, indices, cut))
        sequences.set_lengths(self.lengths)
        return sequences


class Fenced(Paged):
    """The same with the end of every block at the end of memory: one byte more, and the process is ended."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.areas: list[mmap.mmap] = []
        size = self.stride - 16 * case.spec.dtype.itemsize
        self.addresses = [[self._fenced(address, size) for address in row] for row in self.addresses]

    def _fenced(self, address: int, size: int) -> int:
        """A copy of these bytes in front of a page that nobody may read."""
        used = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        area = mmap.mmap(-1, used + mmap.PAGESIZE)
        end = ctypes.addressof(ctypes.c_char.from_buffer(area)) + used
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        ctypes.memmove(end - size, address, size)
        self.areas.append(area)
        return end - size


class Packed:
    """The last queries of each sequence of a case end to end, as many as `counts` says, and where a call writes.

    Query, out and lse are `[total, heads, ...]`, or `[1, heads, total, ...]`.
    """

    def __init__(self, case: Case, counts: list[int], *, four: bool) -> None:
        spec, self.counts, self.four = case.spec, counts, four
        self.cu_queries = [0, *itertools.accumulate(counts)]
        rows = [query[:, spec.queries - n :] for query, n in zip(case.query, counts, strict=True)]
        query = torch.cat([row.transpose(0, 1) for row in rows])  # [total, heads, k_dim]
        wide = torch.full((*query.shape[:2], spec.k_dim + 3), torch.nan, dtype=spec.dtype)
        wide[..., 2:-1] = query
        self.query = self._form(wide[..., 2:-1] if spec.scattered else query)
        self.params = dataclasses.replace(case.params, mask=self._mask(case))
        total, heads, pad = query.shape[0], spec.heads, 5 if spec.scattered else 0
        self.around = torch.full((total + 2, heads + pad, spec.v_dim + pad), 77.0, dtype=spec.out_dtype or spec.dtype)
        self._out = self.around[1:-1, :heads, : spec.v_dim]
        self._lses = torch.full((total + 2, heads + pad), 77.0)
        self._lse = self._lses[1:-1, :heads]
        self.out, self.lse = self._form(self._out), self._form(self._lse)

    def _form(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)[None] if self.four else x

    def _mask(self, case: Case) -> torch.Tensor | None:
        """The case's mask with its queries counted from the first new token of each row."""
        mask = case.params.mask
        if mask is None or mask.shape[2] == 1:
            return mask
        rows, most = len(self.counts), max(self.counts, default=0)
        moved = torch.zeros((rows, mask.shape[1], most, mask.shape[3]), dtype=mask.dtype)
        for row, n in enumerate(self.counts):
            moved[row, :, :n] = mask[row if mask.shape[0] > 1 else 0, :, case.spec.queries - n :]
        return moved

    def row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """out `[heads, queries, v_dim]` and lse `[heads, queries]` of one row."""
        span = slice(self.cu_queries[row], self.cu_queries[row + 1])
        return self._out[span].transpose(0, 1), self._lse[span].T

    def touched_outside(self) -> bool:
        around, lses = self.around.clone(), self._lses.clone()
        around[1:-1, : self._out.shape[1], : self._out.shape[2]] = 77.0
        lses[1:-1, : self._lse.shape[1]] = 77.0
        return bool((around != 77.0).any() or (lses != 77.0).any())


class Result:
    """Where a call writes: filled with other numbers before, and with a guard around."""

    def __init__(self, spec: Spec) -> None:
        batch, dtype = len(spec.lengths), spec.out_dtype or spec.dtype
        pad = 5 if spec.scattered else 0
        self.around = torch.full((batch, spec.queries + pad, spec.heads, spec.v_dim + pad), 77.0, dtype=dtype)
        self.out = self.around[:, : spec.queries, :, : spec.v_dim].transpose(1, 2)
        self._lse = torch.full((batch * spec.heads * spec.queries + 32,), 77.0)
        self.lse = self._lse[16:-16].view(batch, spec.heads, spec.queries)

    def touched_outside(self) -> bool:
        around, lse = self.around.clone(), self._lse
        around[:, : self.out.shape[2], :, : self.out.shape[3]] = 77.0
        return bool((around != 77.0).any() or (lse[:16] != 77.0).any() or (lse[-16:] != 77.0).any())


def attend(case: Case, *, threads: int = 1, paged: Paged | None = None) -> Result:
    paged, result = paged or Paged(case), Result(case.spec)
    call = (paged.shape, case.query, paged.sequences(), case.params)
    native.attend(*call, threads=threads, out=result.out, lse=result.lse)
    return result


def bound(case: Case, s: int, exact: Exact, out: torch.Tensor, lse: torch.Tensor) -> str:
    """What is wrong with the result for sequence `s`; nothing if its errors are within bounds.

    out `[heads, queries, v_dim]`, lse `[heads, queries]`; fewer queries are the last ones. Errors are at most twice
    torch's plus what it costs to round scores, sums and the result once; and, whatever torch does, at most what the
    roundings of fp32 scores, of bf16 weights, of sums and of the result can add up to.
    """
    spec, u = case.spec, UNIT[torch.float32]
    if out.shape[1] < spec.queries:
        names = ("out", "lse", "size", "blur", "step", "theirs")
        exact = Exact(*(getattr(exact, name)[:, spec.queries - out.shape[1] :] for name in names))
    blind = exact.lse == -torch.inf
    if not torch.equal(lse[blind], exact.lse[blind]) or bool(out[blind].count_nonzero()):
        return "a query that sees nothing gets more than 0 and -inf"
    error = (out.double() - exact.out).abs()
    if bool(error.isnan().any()) or bool(lse.isnan().any()):
        return "NaN"
    rounding = UNIT[out.dtype] * exact.out.abs() + TINY[out.dtype]
    theirs = (exact.theirs.to(out.dtype).double() - exact.out).abs()[~blind]
    floor = rounding + (2 * exact.step + 4 * u) * exact.size
    if theirs.numel() and float(error.max()) > 2 * float(theirs.max()) + float(floor.max()):
        return f"error {float(error.max()):.3g}, torch's is {float(theirs.max()):.3g}"
    weight = UNIT[torch.bfloat16] if spec.dtype == torch.bfloat16 else 0.0
    allowed = rounding + (weight + 2 * exact.blur + (16 + 2 * spec.lengths[s] ** 0.5) * u) * exact.size
    if bool((error > allowed).any()):
        return f"error {float((error / allowed).max()):.3g} times what rounding explains"
    difference = (lse - exact.lse).abs()[~blind]
    allowed = (1e-6 + exact.blur.squeeze(-1) + 1e-6 * exact.lse.abs())[~blind]
    if bool((difference > allowed).any()):
        return f"lse is off by {float(difference.max()):.3g}"
    return ""


def changed(spec: Spec, **fields: object) -> Spec:
    return dataclasses.replace(spec, **fields)  # type: ignore[arg-type]
