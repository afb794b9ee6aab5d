"""The Triton programs that copy by address: whole blocks, new tokens into blocks, blocks into dense tensors.

Shapes, units and errors are those of `copies`, which launches them. See `programs`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, attr-defined"

from kvtier.kernels.programs import bound, tl, triton, typed


@typed(i32="count quads chunks programs")
def copy(sources, targets, count, quads, chunks, programs, WORDS: tl.constexpr):
    """Blocks of `quads` times four 4-byte words from addresses to addresses, shared by `programs` programs."""
    words = quads * 4  # so the compiler sees that 16 bytes at a time are all within or all beyond
    for item in range(bound(tl.program_id(0)), bound(count * chunks), bound(programs)):
        block = item // chunks
        i = item % chunks * WORDS + tl.arange(0, WORDS)
        source = tl.multiple_of(tl.load(sources + block).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of(tl.load(targets + block).to(tl.pointer_type(tl.int32)), 16)
        tl.store(target + i, tl.load(source + i, mask=i < words), mask=i < words)


@triton.jit
def _move(source, target, ok, source_dim, target_dim, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of DIM elements from pointers to pointers, where `ok`."""
    d = tl.arange(0, WIDTH)[None, :]
    there = ok[:, None] & (d < DIM)
    x = tl.load(source[:, None] + d * source_dim, mask=there)
    tl.store(target[:, None] + d * target_dim, x, mask=there)


_DENSE = {
    "i32": "tokens tiles blocks start rows",
    "i64": "key_row key_head key_token value_row value_head value_token addresses_row positions_row",
}


@typed(**_DENSE)
def append(
    keys,
    values,
    addresses,
    starts,
    cu_tokens,
    start,  # of every row, where `starts` is None
    addresses_row,
    rows,
    tokens,  # of every row; with `cu_tokens`, of all
    tiles,
    key_row,
    key_head,
    key_token,
    key_dim,
    value_row,
    value_head,
    value_token,
    value_dim,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    DENSE_ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """New tokens of one head of one row into the blocks that the table names; blocks at address 0 are left out.

    With `cu_tokens`, a program takes TOKENS tokens of all rows, one after the other, and finds each token's row.
    """
    HEADS: tl.constexpr = K_HEADS if K_HEADS > V_HEADS else V_HEADS
    dtype: tl.constexpr = keys.dtype.element_ty
    BYTES: tl.constexpr = dtype.primitive_bitwidth // 8
    pid = tl.program_id(0)
    head = (pid // tiles % HEADS).to(tl.int64)
    token = (pid % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    live = token < tokens
    if cu_tokens is None:
        row = (pid // (tiles * HEADS)).to(tl.int64)
        slot = token
        if starts is not None:
            start = tl.load(starts + row)
    else:
        row = _row_of(cu_tokens, token, rows, 128)
        live = live & (row < rows)
        slot = token - tl.load(cu_tokens + row, mask=live, other=0)
        if starts is not None:
            start = tl.load(starts + row, mask=live, other=0)
    slot += start
    address = tl.load(addresses + row * addresses_row + slot // SIZE, mask=live, other=0)
    written = address != 0
    inner = head * SIZE + slot % SIZE
    if head < K_HEADS:
        source = keys + row * key_row + head * key_head + token * key_token
        target = tl.multiple_of((address + inner * (K_DIM * BYTES)).to(tl.pointer_type(dtype)), K_ALIGN)
        _move(tl.multiple_of(source, DENSE_ALIGN), target, written, key_dim, 1, K_DIM, K_WIDTH)
    if head < V_HEADS:
        source = values + row * value_row + head * value_head + token * value_token
        target = address + VALUES * BYTES + inner * (V_DIM * BYTES)
        target = tl.multiple_of((target).to(tl.pointer_type(dtype)), V_ALIGN)
        _move(tl.multiple_of(source, DENSE_ALIGN), target, written, value_dim, 1, V_DIM, V_WIDTH)


@triton.jit
def _row_of(cu_tokens, token, rows, STEP: tl.constexpr):
    """How many rows end at or before each token: which row it belongs to, where that is less than `rows`."""
    row = tl.zeros_like(token)
    for first in range(0, bound(rows), STEP):
        i = first + tl.arange(0, STEP)
        end = tl.load(cu_tokens + 1 + i, mask=i < rows, other=2147483647)
        row += tl.sum((end[None, :] <= token[:, None]).to(tl.int64), 1)
    return row


@typed(**_DENSE)
def gather(
    keys,
    values,
    addresses,
    counts,
    positions,
    blocks,  # of every row, where `counts` is None
    tokens,
    tiles,
    addresses_row,
    positions_row,
    key_row,
    key_head,
    key_token,
    key_dim,
    value_row,
    value_head,
    value_token,
    value_dim,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    DENSE_ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Slots of one head of one row to where their tokens stand in dense keys and values."""
    HEADS: tl.constexpr = K_HEADS if K_HEADS > V_HEADS else V_HEADS
    dtype: tl.constexpr = keys.dtype.element_ty
    BYTES: tl.constexpr = dtype.primitive_bitwidth // 8
    pid = tl.program_id(0)
    head = (pid // tiles % HEADS).to(tl.int64)
    row = (pid // (tiles * HEADS)).to(tl.int64)
    slot = (pid % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    if counts is not None:
        blocks = tl.load(counts + row)
    block = slot // SIZE
    inside = block < blocks
    address = tl.load(addresses + row * addresses_row + block, mask=inside, other=0)
    token = slot
    if positions is not None:
        index = tl.load(positions + row * positions_row + block, mask=inside, other=0)
        token = index.to(tl.int64) * SIZE + slot % SIZE
    asked = inside & (token < tokens) & (address != 0)
    inner = head * SIZE + slot % SIZE
    if head < K_HEADS:
        source = tl.multiple_of((address + inner * (K_DIM * BYTES)).to(tl.pointer_type(dtype)), K_ALIGN)
        target = keys + row * key_row + head * key_head + token * key_token
        _move(source, tl.multiple_of(target, DENSE_ALIGN), asked, 1, key_dim, K_DIM, K_WIDTH)
    if head < V_HEADS:
        source = address + VALUES * BYTES + inner * (V_DIM * BYTES)
        source = tl.multiple_of((source).to(tl.pointer_type(dtype)), V_ALIGN)
        target = values + row * value_row + head * value_head + token * value_token
        _move(source, tl.multiple_of(target, DENSE_ALIGN), asked, 1, value_dim, V_DIM, V_WIDTH)
