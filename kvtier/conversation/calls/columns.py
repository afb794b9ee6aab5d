"""`Columns`: what is kept of all rows of a call, whose padding makes them begin at different columns."""

from __future__ import annotations

from collections.abc import Collection

from kvtier.conversation.calls.call import Call
from kvtier.conversation.index import WIDTH, common
from kvtier.conversation.kept.kept import Entry, Kept

#: Tokens behind a gap for which one more forward is made. Where nothing is missing before them, one is enough.
LEAST_BEHIND = 16


class Columns:
    """Finds for the rows of a call what is kept of each. Its methods are called under the memory's lock."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def of(self, call: Call) -> tuple[int, list[Entry]]:
        """Columns that are there of every row of a call from its first token on, and what has them."""
        entries, columns = [], call.ids.shape[1] - 1  # the last token's logits are wanted
        for row, pad in zip(call.rows, call.pads, strict=True):
            found = self._kept.find_whole(call.key, row)
            if found is None:
                return 0, []
            columns = min(columns, common(found.ids, row) + pad, found.sequence.length + pad)
            entries.append(found)
        return (columns, entries) if columns > max(call.pads) else (0, [])

    def with_states(self, call: Call) -> tuple[int, list[Entry]]:
        """As `of`, where layers keep states: all rows, which have no padding, continue at one position, of which each
        has a copy."""
        common_to: dict[int, list[Entry]] | None = None
        for row in call.rows:
            mine: dict[int, Entry] = {}
            for length, found in self._kept.states_of(call.key, row[:-WIDTH]):
                mine.setdefault(length, found)
            before = common_to
            common_to = {
                n: [*(before[n] if before is not None else []), x]
                for n, x in mine.items()
                if before is None or n in before
            }
        columns = max(common_to or {}, default=0)
        return (columns, common_to[columns]) if columns and common_to else (0, [])

    def behind(self, call: Call, columns: int, passed: Collection[Entry] = ()) -> tuple[int, Entry | None]:
        """What a call of one row can go on with, once it has computed what is missing behind so many columns: tokens
        that are kept there, and the entry. The nearest one that is worth it, but for some; it may begin within these
        columns."""
        if len(call.rows) > 1 or any(call.pads):
            return 0, None
        (row,) = call.rows
        found: Entry | None = None
        tokens, nearest = 0, (0, 0)
        for start, stop, entry in self._kept.overlapping(call.key, row[:-WIDTH]):  # the last token's logits are wanted
            begins = max(start, columns)
            least = LEAST_BEHIND if start > columns else 1
            if entry not in passed and stop - begins >= least and (found is None or (begins, -stop) < nearest):
                tokens, found, nearest = stop - start, entry, (begins, -stop)
        return tokens, found
