"""Reading ahead: the next file is read and checked while what the last one holds is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvtier.conversation.disk.files.files import Buffer

T = TypeVar("T")


def read_ahead(reads: Sequence[Callable[[Buffer], T]]) -> Generator[T]:
    """What some reads give, in order. While the caller uses one, a thread makes the next; there is no other thread, and
    none where there is only one read, or where the system has no thread to give.

    A read is given one of two buffers, so that what it gives is valid until the next one is asked for. The thread ends
    with the iterator: whoever does not go to the end closes it. A read that is under way then breaks off at its next
    piece; one that the disk does not answer is waited for, as every read is.

    Raises: what the reads raise, each in its turn; none is made after it.
    """
    buffers = (Buffer(), Buffer())
    pool, next_one, threads = ThreadPoolExecutor(1, "kvtier-reading"), None, True
    try:
        for i, read in enumerate(reads):
            found = read(buffers[i % 2]) if next_one is None else next_one.result()
            next_one = None
            if threads and i + 1 < len(reads):
                next_one = _submit(pool, reads[i + 1], buffers[(i + 1) % 2])
                # The pool keeps what it had no thread for, and one that came later would read it into what is used.
                threads = next_one is not None
            yield found
            del found
    finally:
        for buffer in buffers:
            buffer.awaited = False
        pool.shutdown(cancel_futures=True)


def _submit(pool: ThreadPoolExecutor, read: Callable[[Buffer], T], buffer: Buffer) -> Future[T] | None:
    """None: there is no thread to be had, and the caller reads for itself from now on."""
    try:
        return pool.submit(read, buffer)
    except RuntimeError:
        return None
