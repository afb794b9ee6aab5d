"""Chunks whose ends are erased, and what continues them before that: they get other rows, and other numbers, for
parents come first. As in `Disk`, a file is on the disk with its name before its row is there."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.files.files import Damaged, read_tensors, write_tensors
from kvtier.conversation.disk.files.folder import Folder, sync_names
from kvtier.conversation.disk.manifest import Row
from kvtier.conversation.index import WIDTH


def cut(folder: Folder, stops: Mapping[Chunk, int], rows: Mapping[int, Row], number: int) -> list[Row] | None:
    """Make files in place of those of some chunks, with the tokens before where each is to stop: the rows of these
    files. None: there are none, for one that is cut holds copies of states, or cannot be read or written.

    Args:
        stops: behind the first token of each chunk; what continues a chunk is there too, and behind it.
        rows: of these and their parents, by number.
        number: the first of as many that no chunk has had. Whoever calls removes the files that get no rows.
    """
    made = dict[int, Row]()
    try:
        for at, (chunk, stop) in enumerate(stops.items(), number):
            row, file = rows[chunk.number], folder.file(chunk.number)
            ids, nbytes, sums = row.ids, row.nbytes, row.checksum
            if stop < chunk.stop:
                tensors, said = read_tensors(file, nbytes, sums)
                if said or any(not name.startswith(("k.", "v.")) for name in tensors):
                    break
                ids = ids[: (stop - row.start) * WIDTH]
                tensors = {name: x[:, : stop - row.start].contiguous() for name, x in tensors.items()}
                nbytes, sums = write_tensors(folder.file(at), tensors, "")
            else:
                os.link(file, folder.file(at))
            above = made.get(row.parent) if row.parent is not None else None
            above = rows[row.parent] if above is None and row.parent is not None else above
            parent = None if above is None else (above.number, above.digest)
            made[chunk.number] = Row.of(at, row.key, parent, row.start, ids, nbytes, sums)
        else:
            sync_names(folder.path)
            return list(made.values())
    except (Damaged, KeyError, OSError, MemoryError):
        pass
    return None
