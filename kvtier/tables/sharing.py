"""Which rows of a batch share a block table, and how many blocks new tokens take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.memory.blocks.block import Run
from kvtier.memory.storage.layout import BlockLayout
from kvtier.tables.table import BlockTable


class Group:
    """Rows of a batch that are bitwise equal so far and hence share one table.

    Attributes:
        row: the row whose keys and values are written.
        rows: all of them.
        table: the table they continue; None for a new one.
        fork: continue a copy of `table`, because other rows continue it too.
        shared: index of an earlier group whose first blocks are the same, or None.
        shared_blocks: how many.
        padding: these blocks hold one token over and over, as padding does. A mask may hide it from one row and not
            from the other, and in later layers it is not the same then.
    """

    __slots__ = ("fork", "padding", "row", "rows", "shared", "shared_blocks", "table")

    def __init__(self, row: int, table: BlockTable | None, fork: bool) -> None:
        self.row = row
        self.rows = [row]
        self.table = table
        self.fork = fork
        self.shared: int | None = None
        self.shared_blocks = 0
        self.padding = False

    @property
    def surely_shared(self) -> int:
        """Blocks that are shared in every layer."""
        return 0 if self.padding else self.shared_blocks


class Alike:
    """How many leading tokens of each row are bitwise those of the row before, as the first layer of a forward saw it.

    Layers of one forward see the same tokens: rows that differ in the first layer are not compared in later ones, and
    the CPU waits for the device once per forward, not once per layer.

    Attributes:
        rows, tokens: of the forward.
        any: whether some row may share blocks with the one before.
    """

    __slots__ = ("any", "rows", "tokens")

    def __init__(self, rows: int, tokens: int, any: bool) -> None:
        self.rows = rows
        self.tokens = tokens
        self.any = any


def group_rows(
    rows: Sequence[BlockTable],
    layout: BlockLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    known: Alike | None = None,
) -> tuple[list[Group], Alike | None]:
    """Which rows share a table when `keys` and `values` are appended. Changes nothing.

    Bitwise equal rows share one (beams and several return sequences repeat the prompt's rows), and new rows that begin
    with the same whole blocks share those. Single new tokens are not compared: that is where equal rows part.

    Args:
        rows: the table of each row so far; empty if there is no past.
        layout: of the layer.
        keys: `[batch, k_heads, tokens, k_dim]`.
        values: `[batch, v_heads, tokens, v_dim]`.
        known: what an earlier layer of the same forward found.

    Returns:
        the groups, and what was found, for later layers; None where nothing was compared.
    """
    batch, tokens = keys.shape[0], keys.shape[2]
    if batch == 0:
        return [], None
    past = bool(rows)
    if past and (tokens == 1 or len(set(rows)) == batch):
        same, alike = [0] * (batch - 1), None
    elif known is not None and (known.rows, known.tokens) == (batch, tokens) and not known.any:
        same, alike = [0] * (batch - 1), known
    else:
        same = _equal_tokens(keys, values, layout.block_size) if batch > 1 else []
        alike = Alike(batch, tokens, any(n == tokens or (not past and n >= layout.block_size) for n in same))
    groups: list[Group] = []
    if not past:
        groups = [Group(0, None, False)]
        for row in range(1, batch):
            if same[row - 1] == tokens:
                groups[-1].rows.append(row)
                continue
            groups.append(Group(row, None, False))
            if same[row - 1] >= layout.block_size:
                groups[-1].shared = len(groups) - 2
                groups[-1].shared_blocks = same[row - 1] // layout.block_size
                groups[-1].padding = _is_one_token(keys[row], values[row], same[row - 1])
        return groups, alike
    latest: dict[BlockTable, Group] = {}
    for row, table in enumerate(rows):
        last = latest.get(table)
        if last is not None and last.rows[-1] == row - 1 and same[row - 1] == tokens:
            last.rows.append(row)
            continue
        latest[table] = Group(row, table, fork=last is not None)
        groups.append(latest[table])
    return groups, alike


def distinct_rows(layers: Sequence[Sequence[BlockTable]]) -> tuple[list[int], list[int]]:
    """The rows of a cache that differ, those with a common beginning next to each other: written in this order,
    `group_rows` shares what they share.

    Args:
        layers: the table of each row, by layer.

    Returns:
        Numbers of rows; and for each row, which of these it is.
    """
    seen: dict[Run, int] = {}
    shapes = [
        tuple(tuple(seen.setdefault(run, len(seen)) for run in rows[row].resolve()) for rows in layers)
        for row in range(min(map(len, layers), default=0))
    ]
    first: dict[tuple[tuple[int, ...], ...], int] = {}
    for row, shape in enumerate(shapes):
        first.setdefault(shape, row)
    order = sorted(first)  # by numbers that rise with rows: those that share nothing keep their order
    return [first[shape] for shape in order], [order.index(shape) for shape in shapes]


def likely_groups(rows: Sequence[BlockTable], tokens: int) -> list[Group]:
    """What `group_rows` will answer for `tokens` new tokens, if rows that are equal so far stay so."""
    groups: list[Group] = []
    seen: set[BlockTable] = set()
    for row, table in enumerate(rows):
        if table not in seen or tokens == 1:
            groups.append(Group(row, table, fork=table in seen))
        seen.add(table)
    return groups


def same_groups(rows: Sequence[BlockTable], groups: Sequence[Group]) -> list[Group]:
    """The groups of another layer of the same forward in a layer with these rows, which part in the same way.

    Args:
        rows: the table of each row; empty if there is no past.
        groups: what `group_rows` answered for the other layer.
    """
    found: list[Group] = []
    seen: set[BlockTable] = set()
    for group in groups:
        last: Group | None = None
        for row in group.rows:
            table = rows[row] if rows else None
            if last is not None and table is last.table:
                last.rows.append(row)
                continue
            last = Group(row, table, fork=table in seen)
            if table is None:
                last.shared, last.shared_blocks = group.shared, group.surely_shared
            else:
                seen.add(table)
            found.append(last)
    return found


def blocks_needed(groups: Sequence[Group], tokens: int, block_size: int) -> int:
    """New slots that appending `tokens` to each group takes, copies on write included."""
    needed = 0
    for group in groups:
        table = group.table
        length = 0 if table is None else table.length
        needed += -(-(length + tokens) // block_size) - -(-length // block_size)
        if table is None:
            needed -= group.shared_blocks
        elif length % block_size:
            tail = table.resolve()[-1]
            needed += group.fork or tail.refs > 1 or tail.blocks.parked
    return needed


def blocks_needed_apart(groups: Sequence[Group], tokens: int, later: int, block_size: int) -> int:
    """New slots that `tokens` appended to each group take, and then `later` tokens of every row for itself."""
    needed = blocks_needed(groups, tokens, block_size)
    for group in groups:
        length = (0 if group.table is None else group.table.length) + tokens
        each = -(-(length + later) // block_size) - length // block_size
        needed += len(group.rows) * each - (1 if length % block_size else 0)
    return needed


def _equal_tokens(keys: torch.Tensor, values: torch.Tensor, probe: int) -> list[int]:
    """For each row but the first, how many leading tokens are bitwise those of the row before.

    Only rows whose first `probe` tokens agree are compared to the end, one pair at a time: batches of different prompts
    cost one small comparison and one synchronisation.
    """
    batch, tokens = keys.shape[0], keys.shape[2]
    if batch == 0:
        return []
    k, v = (x.detach().view(_BITS[x.dtype.itemsize]) for x in (keys, values))
    counts: list[int] = _leading(k[1:, :, :probe], k[:-1, :, :probe], v[1:, :, :probe], v[:-1, :, :probe]).tolist()
    alike = [row for row in range(1, batch) if counts[row - 1] == min(probe, tokens)]
    if alike and tokens > probe:
        whole = torch.stack([_leading(k[r : r + 1], k[r - 1 : r], v[r : r + 1], v[r - 1 : r]) for r in alike])
        for row, count in zip(alike, whole.flatten().tolist(), strict=True):
            counts[row - 1] = count
    return counts


def _is_one_token(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> bool:
    """Whether the first tokens of a row, `[heads, tokens, dim]`, are all the same: in keys, or, where positions are in
    these, in values."""
    alike = [(x[:, :tokens] == x[:, :1]).all() for x in (keys, values)]
    return bool(alike[0] | alike[1])


def _leading(k: torch.Tensor, other_k: torch.Tensor, v: torch.Tensor, other_v: torch.Tensor) -> torch.Tensor:
    """Leading tokens in which two stacks of rows `[rows, heads, tokens, dim]` agree in keys and values, `[rows]`."""
    same = (k == other_k).all(-1).all(1) & (v == other_v).all(-1).all(1)
    return same.long().cumprod(1).sum(1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
