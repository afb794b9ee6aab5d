"""The Triton programs: attention through block tables, and the merge of its parts.

This is the only module that imports triton; it is imported at the first launch. Shapes, units and errors are those
of the functions that launch these: `paged` and `copies`. Names in capitals are compiled in; everything else is data.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

import inspect

import triton
import triton.language as tl
from triton import OutOfResources as OutOfResources  # raised where a device has less than a program takes
from triton.runtime.driver import driver

#: Triton's interpreter multiplies the bits of bf16 numbers as integers: there, products are made in fp32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

#: Versions whose way to launch a compiled program `relauncher` knows.
_KNOWN = ("3.6",)

#: log2(e): scores are kept in units of log2 where that is exact enough, because devices raise to powers of two.
_LOG2E = tl.constexpr(1.4426950408889634)


def typed(**numbers):
    """Compiled once for all numbers, given by type: Triton tells 1, multiples of 16 and those beyond 32 bits apart."""

    def jit(program):
        every = inspect.signature(program).parameters
        # What is not annotated are pointers; their alignment is told by constants.
        pointers = [name for name in every if name not in program.__annotations__]
        types = {name: kind for kind, names in numbers.items() for name in names.split() if name in every}
        program.__annotations__ |= types
        return triton.jit(program, do_not_specialize=[*types], do_not_specialize_on_alignment=pointers)

    return jit


def relauncher(compiled, constants):
    """What launches a compiled program again: called with the number of programs and the arguments before `constants`.

    It does what `compiled[grid](*args)` does, without asking Triton for the device and its hooks' metadata each time.
    Where hooks are set (a profiler's), or Triton is of another version, it calls just that.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in _KNOWN:
        return lambda count, *args: compiled[(count, 1, 1)](*args, *constants)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    device = driver.active.get_current_device()
    hooks = triton.knobs.runtime

    def launch(count, *args):
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[(count, 1, 1)](*args, *constants)
        else:
            stream = driver.active.get_current_stream(device)
            run(count, 1, 1, stream, function, packed, None, None, None, *args, *constants)

    return launch


@triton.jit
def bound(x):
    """A number as a bound of a loop: the interpreter's numbers are arrays, which Python does not count to."""
    return x.handle.data.item() if INTERPRETED else x


@triton.jit
def _round(x, dtype: tl.constexpr):
    """fp32 to `dtype`, to the nearest; the interpreter cuts the bits off that bf16 does not have."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 1.2e-38, 0.0, tl.where(x == x, near, x))
    return x.to(dtype)


@triton.jit
def _dot(a, b, sum):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sum, input_precision="ieee")


@triton.jit
def _power(x, NATURAL: tl.constexpr):
    """e**x, or 2**x where scores are kept in units of log2."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def _chunk(at, live, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Columns START.. of the rows at the pointers `at`, `[rows, WIDTH]`; zeros behind DIM and where not `live`."""
    d = START + tl.arange(0, WIDTH)
    where = at[:, None] + d[None, :]
    if START + WIDTH > DIM:
        there = (d < DIM)[None, :] & live[:, None] if EDGE else (d < DIM)[None, :]
        x = tl.load(where, mask=there, other=0.0)
    elif EDGE:
        x = tl.load(where, mask=live[:, None], other=0.0)
    else:
        x = tl.load(where)
    return x


@triton.jit
def _below(positions, count, edge, STEP: tl.constexpr):
    """How many of the first `count` positions, which rise, are below `edge`."""
    found = 0
    for start in range(0, bound(count), STEP):
        i = start + tl.arange(0, STEP)
        position = tl.load(positions + i, mask=i < count, other=2147483647)
        found += tl.sum((position < edge).to(tl.int32), 0)
    return found


# fmt: off
@triton.jit
def _walk(
    # so far: [rows] highest score, [rows] sum of powers, weighted sums of values [rows, V_MAIN] and [rows, V_REST]
    high, total, acc, acc_rest,
    q, q_rest,
    # slots [lo, hi) of the table's row, lo a multiple of TOKENS; tokens outside [floor, limit) are seen by no query
    lo, hi, floor, limit,
    addresses, positions, mask, mask_token,
    # [rows] position of each query, whether there is one, and its slope
    at, live_row, slope,
    # bytes from a block's begin to the head's keys and to its values
    head_offset, value_offset,
    scale, cap, window,
    dtype: tl.constexpr,
    K_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_REST: tl.constexpr,
    K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ADDED: tl.constexpr, NATURAL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Attend to the slots [lo, hi), a tile of TOKENS at a time; without EDGE, every query sees all of them."""
    BYTES: tl.constexpr = dtype.primitive_bitwidth // 8
    pointer: tl.constexpr = tl.pointer_type(dtype)
    for start in range(bound(lo), bound(hi), TOKENS):
        slot = start + tl.arange(0, TOKENS)
        position = slot
        if SIZE % TOKENS == 0:
            # The tile is within one block: one address, and tokens in a row.
            block = start // SIZE
            inner = start % SIZE + tl.arange(0, TOKENS)
            address = tl.load(addresses + block)
            k_at = tl.multiple_of((address + head_offset).to(pointer), K_ALIGN) + inner * K_DIM
            v_at = tl.multiple_of((address + value_offset).to(pointer), V_ALIGN) + inner * V_DIM
            if positions is not None:
                position = tl.load(positions + block) * SIZE + inner
        else:
            # Short blocks make one tile, token by token.
            block = slot // SIZE
            inner = slot % SIZE
            there = slot < hi
            address = tl.load(addresses + block, mask=there, other=0)
            k_at = tl.multiple_of((address + head_offset + inner * (K_DIM * BYTES)).to(pointer), K_ALIGN)
            v_at = tl.multiple_of((address + value_offset + inner * (V_DIM * BYTES)).to(pointer), V_ALIGN)
            if positions is not None:
                position = tl.load(positions + block, mask=there, other=0) * SIZE + inner
        # Slots behind a sequence may hold NaN, which not even a weight of zero removes: they are not read.
        live = (slot < hi) & (position >= floor) & (position < limit)

        none = tl.full([q.shape[0], TOKENS], 0.0, tl.float32)
        scores = _dot(q, tl.trans(_chunk(k_at, live, 0, K_MAIN, K_DIM, EDGE)), none)
        if K_REST:
            scores = _dot(q_rest, tl.trans(_chunk(k_at, live, K_MAIN, K_REST, K_DIM, EDGE)), scores)
        scores = scores * scale
        if CAP:
            # tanh(x) = 1 - 2 / (e**2x + 1); `scale` holds 2 / cap here.
            scores = cap - (2.0 * cap) / (tl.exp(scores) + 1.0)
        if slope is not None:
            scores += slope[:, None] * (position[None, :] - at[:, None]).to(tl.float32)
        if mask is not None:
            mask_at = mask[:, None] + position[None, :].to(tl.int64) * mask_token
            if ADDED:
                scores += tl.load(mask_at, mask=live_row[:, None] & live[None, :], other=0.0).to(tl.float32)
            else:
                shown = tl.load(mask_at, mask=live_row[:, None] & live[None, :], other=0)
                scores = tl.where(shown != 0, scores, float("-inf"))
        if EDGE:
            seen = live[None, :]
            if CAUSAL:
                seen = seen & (position[None, :] <= at[:, None])
            if WINDOW:
                seen = seen & (position[None, :] > at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))

        higher = tl.maximum(high, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = _power(scores - base[:, None], NATURAL)
        fade = _power(high - base, NATURAL)
        total = total * fade + tl.sum(weights, 1)
        high = higher
        weights = _round(weights, dtype)
        acc = _dot(weights, _chunk(v_at, live, 0, V_MAIN, V_DIM, EDGE), acc * fade[:, None])
        if V_REST:
            values = _chunk(v_at, live, V_MAIN, V_REST, V_DIM, EDGE)
            acc_rest = _dot(weights, values, acc_rest * fade[:, None])
    return high, total, acc, acc_rest


@typed(
    i32="length queries blocks tiles parts window",
    i64="query_row query_head query_token query_dim out_part out_row out_head out_token "
    "lse_part lse_row lse_head lse_token addresses_row positions_row mask_row mask_head mask_query mask_token",
    fp32="scale cap",
)
def attend(
    query, out, lse, addresses, counts, positions, lengths, cu_queries, mask, first_valid, sinks, slopes,
    # What changes while a batch decodes. Tokens and blocks of every sequence, where there are no `lengths`, `counts`;
    # strides of the table and of the mask
    length, blocks, addresses_row, positions_row, mask_row, mask_head, mask_query, mask_token,
    # What does not. With `cu_queries`, `queries` are the most that are answered of a sequence; then strides
    queries, tiles, parts,
    query_row, query_head, query_token, query_dim, out_part, out_row, out_head, out_token,
    lse_part, lse_row, lse_head, lse_token,
    scale, cap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    # head sizes, and the powers of two that they are made of
    K_DIM: tl.constexpr, K_MAIN: tl.constexpr, K_REST: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_REST: tl.constexpr,
    # tokens in a block; elements between the begins of its keys and its values
    SIZE: tl.constexpr, VALUES: tl.constexpr,
    # bytes that every query, result, key and value begins at a multiple of
    Q_ALIGN: tl.constexpr, O_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr,
    # whether `query_dim` is 1
    Q_ROWS: tl.constexpr,
    # the attention parameters; ADDED: the mask is added, not a choice
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ADDED: tl.constexpr,
    # so few queries that it does not pay to find out which tiles all of them see
    LOW_QUERY: tl.constexpr,
    # the tile
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):
    """One tile of the (query, head of a group) rows of one KV head of one sequence, over one part of its slots."""
    dtype: tl.constexpr = query.dtype.element_ty
    BYTES: tl.constexpr = dtype.primitive_bitwidth // 8
    # A mask may hold the lowest number there is, which times log2(e) would be -inf: such scores stay natural.
    NATURAL: tl.constexpr = ADDED
    UNIT: tl.constexpr = 1.0 if NATURAL else _LOG2E

    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles  # under a causal mask the last tiles take longest: they begin first
    kv_head = pid // tiles % KV_HEADS
    part = pid // (tiles * KV_HEADS) % parts
    row = (pid // (tiles * KV_HEADS * parts)).to(tl.int64)

    begin = 0
    answered = queries
    if cu_queries is not None:
        begin = tl.load(cu_queries + row)
        queries = tl.load(cu_queries + row + 1) - begin
        answered = tl.minimum(answered, queries)  # a mask has no rows for the others
    if tile * ROWS >= answered * GROUP:
        return
    if lengths is not None:
        length = tl.load(lengths + row).to(tl.int32)
    if counts is not None:
        blocks = tl.load(counts + row).to(tl.int32)
    addresses += row * addresses_row
    if positions is not None:
        positions += row * positions_row

    r = tile * ROWS + tl.arange(0, ROWS)
    i = r // GROUP
    head = (kv_head * GROUP + r % GROUP).to(tl.int64)
    live_row = i < answered
    at = length - queries + i
    first_at = length - queries + tile * ROWS // GROUP
    last_at = length - queries + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, answered - 1)

    # Tokens [floor, limit) are seen by some query of the tile, [all_floor, all_limit) by every one.
    floor = 0
    limit = length
    if first_valid is not None:
        floor = tl.maximum(floor, tl.load(first_valid + row).to(tl.int32))
    all_floor = floor
    all_limit = limit
    if WINDOW:
        floor = tl.maximum(floor, first_at - window + 1)
        all_floor = tl.maximum(all_floor, last_at - window + 1)
    if CAUSAL:
        limit = tl.minimum(limit, last_at + 1)
        all_limit = tl.minimum(all_limit, first_at + 1)
    all_limit = tl.maximum(all_limit, 0)

    # The same as slots of the table's row.
    if positions is None:
        lo = floor
        hi = tl.minimum(limit, blocks * SIZE)
        all_lo = all_floor
        all_hi = tl.minimum(all_limit, blocks * SIZE)
    else:
        lo = 0
        hi = blocks * SIZE
        if not LOW_QUERY:
            # A block begins before a token, or ends at or before it.
            hi = _below(positions, blocks, (tl.maximum(limit, 0) + SIZE - 1) // SIZE, 256) * SIZE
            all_hi = _below(positions, blocks, all_limit // SIZE, 256) * SIZE
            all_lo = 0
            if WINDOW or first_valid is not None:
                lo = _below(positions, blocks, floor // SIZE, 256) * SIZE
                all_lo = _below(positions, blocks, (all_floor + SIZE - 1) // SIZE, 256) * SIZE
    lo = lo // TOKENS * TOKENS
    share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), TOKENS), parts) * TOKENS
    lo += part * share
    hi = tl.maximum(tl.minimum(hi, lo + share), lo)
    inner_lo = hi
    inner_hi = hi
    if not LOW_QUERY:
        inner_lo = tl.minimum(tl.maximum(tl.cdiv(all_lo, TOKENS) * TOKENS, lo), hi)
        inner_hi = tl.maximum(tl.minimum(all_hi // TOKENS * TOKENS, hi), inner_lo)

    query_at = query + row * query_row + head * query_head + (begin + i).to(tl.int64) * query_token
    if Q_ROWS:
        query_at = tl.multiple_of(query_at, Q_ALIGN)
        query_dim = 1
    d = tl.arange(0, K_MAIN)
    q = tl.load(query_at[:, None] + (d * query_dim)[None, :], mask=live_row[:, None] & (d < K_DIM)[None, :], other=0.0)
    q_rest = q
    if K_REST:
        d = K_MAIN + tl.arange(0, K_REST)
        live_dim = live_row[:, None] & (d < K_DIM)[None, :]
        q_rest = tl.load(query_at[:, None] + (d * query_dim)[None, :], mask=live_dim, other=0.0)

    if mask is not None:
        mask += row * mask_row + head * mask_head + i.to(tl.int64) * mask_query
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head).to(tl.float32) * UNIT
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if sinks is not None:
        # Sinks are one more token without a value, and in the first part only.
        sink = tl.load(sinks + head).to(tl.float32) * UNIT
        counted = (part == 0) & (sink != float("-inf"))
        high = tl.where(counted, sink, high)
        total = tl.where(counted, 1.0, total)
    if CAP:
        scale = scale * 2.0 / cap
        cap = cap * UNIT
    else:
        scale = scale * UNIT
    acc = tl.full([ROWS, V_MAIN], 0.0, tl.float32)
    acc_rest = total
    if V_REST:
        acc_rest = tl.full([ROWS, V_REST], 0.0, tl.float32)

    head_offset = kv_head * (SIZE * K_DIM * BYTES)
    value_offset = VALUES * BYTES + kv_head * (SIZE * V_DIM * BYTES)
    # Tiles that some queries see in part, tiles that all see whole, and again in part.
    for phase in tl.static_range(3):
        if (phase == 0 and (LOW_QUERY or WINDOW or first_valid is not None)) or (phase > 0 and not LOW_QUERY):
            from_slot = lo if phase == 0 else inner_lo if phase == 1 else inner_hi
            to_slot = inner_lo if phase == 0 else inner_hi if phase == 1 else hi
            high, total, acc, acc_rest = _walk(
                *(high, total, acc, acc_rest, q, q_rest, from_slot, to_slot, floor, limit),
                addresses, positions, mask, mask_token, at, live_row, slope, head_offset, value_offset,
                scale, cap, window, dtype,
                *(K_DIM, K_MAIN, K_REST, V_DIM, V_MAIN, V_REST, K_ALIGN, V_ALIGN, SIZE, TOKENS),
                *(CAUSAL, WINDOW, CAP, ADDED, NATURAL),
                phase != 1,
            )

    result: tl.constexpr = out.dtype.element_ty
    nothing = total == 0.0
    share_of = 1.0 / tl.where(nothing, 1.0, total)
    i = begin + i.to(tl.int64)
    tl.store(
        lse + part * lse_part + row * lse_row + head * lse_head + i * lse_token,
        tl.where(nothing, float("-inf"), high / UNIT + tl.log(tl.where(nothing, 1.0, total))),
        mask=live_row,
    )
    out_at = tl.multiple_of(out + part * out_part + row * out_row + head * out_head + i * out_token, O_ALIGN)[:, None]
    d = tl.arange(0, V_MAIN)[None, :]
    tl.store(out_at + d, _round(acc * share_of[:, None], result), mask=live_row[:, None] & (d < V_DIM))
    if V_REST:
        d = V_MAIN + tl.arange(0, V_REST)[None, :]
        tl.store(out_at + d, _round(acc_rest * share_of[:, None], result), mask=live_row[:, None] & (d < V_DIM))


@typed(i32="parts second third", i64="out_1 lse_1 out_2 lse_2 out_3 lse_3 a b c la lb lc")
def merge(
    # Part p begins out_p and lse_p elements behind the first one; where not SEPARATE, p * out_1 and p * lse_1
    outs, lses, out, lse, parts, out_1, lse_1, out_2, lse_2, out_3, lse_3,
    # rows are numbered through three dimensions: the sizes of the last two, the strides of `out` and of `lse`
    second, third, a, b, c, la, lb, lc,
    V_DIM: tl.constexpr,
    # bytes that every row of a part, and of the result, begins at a multiple of
    ALIGN: tl.constexpr, O_ALIGN: tl.constexpr,
    # columns of a program; parts there may be, and parts read at a time
    COLUMNS: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr,
    # parts are at most four tensors, anywhere
    SEPARATE: tl.constexpr,
):
    """Some columns of one row: the parts' results, weighted by their shares of the sum."""
    CHUNKS: tl.constexpr = (V_DIM + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    row = (pid // CHUNKS).to(tl.int64)
    d = pid % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)

    every = tl.arange(0, MOST).to(tl.int64)
    each = tl.load(lses + _behind(every, lse_1, lse_2, lse_3, SEPARATE) + row, mask=every < parts, other=float("-inf"))
    high = tl.max(each, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    total = tl.sum(tl.exp(each - base), 0)
    nothing = total == 0.0

    acc = tl.full([COLUMNS], 0.0, tl.float32)
    for start in range(0, bound(parts), STEP):
        part = start + tl.arange(0, STEP).to(tl.int64)
        part_lse = lses + _behind(part, lse_1, lse_2, lse_3, SEPARATE) + row
        weights = tl.exp(tl.load(part_lse, mask=part < parts, other=float("-inf")) - base)
        # An empty part's numbers are not read.
        used = (weights != 0.0)[:, None] & (d < V_DIM)[None, :]
        at = tl.multiple_of(outs + _behind(part, out_1, out_2, out_3, SEPARATE) + row * V_DIM, ALIGN)
        x = tl.load(at[:, None] + d[None, :], mask=used, other=0.0)
        acc += tl.sum(x.to(tl.float32) * weights[:, None], 0)
    acc = acc / tl.where(nothing, 1.0, total)

    i = row // (second.to(tl.int64) * third)
    j = row // third % second
    k = row % third
    acc = _round(acc, out.dtype.element_ty)
    tl.store(tl.multiple_of(out + i * a + j * b + k * c, O_ALIGN) + d, acc, mask=d < V_DIM)
    if pid % CHUNKS == 0:
        together = base + tl.log(tl.where(nothing, 1.0, total))
        tl.store(lse + i * la + j * lb + k * lc, tl.where(nothing, float("-inf"), together))


@triton.jit
def _behind(part, first, second, third, SEPARATE: tl.constexpr):
    """Elements from the begin of part 0 to that of `part`."""
    offset = part * first
    if SEPARATE:
        offset = tl.where(part == 2, second, tl.where(part == 3, third, offset))
    return offset
