"""New keys and values into blocks in host memory, without a torch operation: one call of the library for all rows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from kvtier.cpu.blocks import Shape
from kvtier.cpu.loader import library, library_with_gil
from kvtier.errors import KVTierError

#: What goes into one block: (its address, the first of its tokens to write, the first new token, tokens).
Span = tuple[int, int, int, int]

# Words of a `kvtier_span` in src/attention.h.
_WORDS, _BLOCK, _OFFSET = 5, 0, 1
#: Copies of more bytes give the GIL back.
_SHORT = 1 << 16


class _Problem(ctypes.Structure):
    # As in src/attention.h.
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("span_count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("key_of_row", ctypes.c_int64),
        ("key_of_head", ctypes.c_int64),
        ("key_of_token", ctypes.c_int64),
        ("value_of_row", ctypes.c_int64),
        ("value_of_head", ctypes.c_int64),
        ("value_of_token", ctypes.c_int64),
        ("k_heads", ctypes.c_int64),
        ("v_heads", ctypes.c_int64),
        ("k_bytes", ctypes.c_int64),
        ("v_bytes", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("values_offset", ctypes.c_int64),
    )


class Appender:
    """Copies new keys and values into blocks of one layout.

    Args:
        shape: of the blocks; any dtype.
        v_heads: heads of the values; None: those of the keys.
        values_offset: bytes from the beginning of a block to its values; None: they follow its keys.
    """

    __slots__ = ("_prepared", "_sizes", "shape", "v_heads", "values_offset")

    def __init__(self, shape: Shape, *, v_heads: int | None = None, values_offset: int | None = None) -> None:
        size = shape.dtype.itemsize
        self.shape = shape
        self.v_heads = shape.kv_heads if v_heads is None else v_heads
        key_bytes = shape.kv_heads * shape.block_size * shape.k_dim * size
        self.values_offset = key_bytes if values_offset is None else values_offset
        self._sizes = (
            *(shape.kv_heads, self.v_heads, shape.k_dim * size, shape.v_dim * size),
            *(shape.block_size, self.values_offset),
        )
        self._prepared: list[TokenWriter] = []

    def append(self, keys: torch.Tensor, values: torch.Tensor, spans: Sequence[Sequence[Span]]) -> None:
        """Copy new tokens into blocks.

        Args:
            keys: `[rows, k_heads, tokens, k_dim]`, any strides with dim contiguous; or `[1, k_heads, total, k_dim]`,
                the tokens of all rows end to end.
            values: the same with v_heads and v_dim.
            spans: for each row, what goes into which block.

        Raises:
            KVTierError: shapes that do not fit, or a span beyond its block or its tokens; nothing is written.
        """
        self._fit(keys, values, len(spans))
        words = array("q")
        total = 0
        for row, some in enumerate(spans):
            for block, offset, token, count in some:
                words.extend((block, offset, row if keys.shape[0] > 1 else 0, token, count))
                total += count
        problem = _Problem(
            keys.data_ptr(),
            values.data_ptr(),
            words.buffer_info()[0],
            len(words) // _WORDS,
            keys.shape[0],
            keys.shape[2],
            *_strides(keys),
            *_strides(values),
            *self._sizes,
        )
        heads, v_heads, k_bytes, v_bytes = self._sizes[:4]
        short = total * (heads * k_bytes + v_heads * v_bytes) <= _SHORT
        _check((library_with_gil() if short else library()).kvtier_append(ctypes.byref(problem)))

    def append_token(
        self, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[int], offsets: int | Sequence[int]
    ) -> None:
        """Copy one new token of each row into its open block: `append` for a decode step, made to be repeated.

        Args:
            keys: `[rows, k_heads, 1, k_dim]` or `[1, k_heads, rows, k_dim]`, any strides with dim contiguous.
            values: the same with v_heads and v_dim.
            blocks: `[rows]` address of each row's block.
            offsets: the token of the block to write, one for all rows or `[rows]`.

        Raises: as `append`.
        """
        # Taken out while it is in use: another thread finds none, and makes its own.
        try:
            writer = self._prepared.pop()
        except IndexError:
            writer = None
        if writer is None or not writer.write(keys, values, blocks, offsets):
            writer = self.token_writer(keys, values, len(blocks))
            writer.write(keys, values, blocks, offsets)
        self._prepared.append(writer)

    def token_writer(self, keys: torch.Tensor, values: torch.Tensor, rows: int) -> TokenWriter:
        """For more tokens like these, one of each row. Raises as `append`."""
        self._fit(keys, values, rows)
        return TokenWriter(self, keys, values, rows)

    def _fit(self, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
        shape = self.shape
        for name, x, heads, dim in (
            ("keys", keys, shape.kv_heads, shape.k_dim),
            ("values", values, self.v_heads, shape.v_dim),
        ):
            fits = x.dim() == 4 and x.shape[0] in (1, rows) and x.shape[1] == heads and x.shape[3] == dim
            fits = fits and x.shape[::2] == keys.shape[::2] and x.dtype is shape.dtype and x.is_cpu
            if not (fits and x.stride(3) == 1):
                what = f"{list(x.shape)} of {x.dtype} on {x.device}, strides {list(x.stride())}"
                raise KVTierError(f"Appending to blocks: `{name}` does not fit the layout or the spans; it is {what}.")


class TokenWriter:
    """Copies one new token of each row: everything but addresses and offsets is prepared. One thread at a time.

    Args:
        appender: of the blocks' layout, by which the tokens fit.
        keys, values: as of `Appender.append_token`.
        rows: of the tokens.
    """

    __slots__ = (
        *("_dtype", "_function", "_key_shape", "_key_strides", "_problem", "_reference", "_rows"),
        *("_value_shape", "_value_strides", "_words", "appender"),
    )

    def __init__(self, appender: Appender, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
        packed = keys.shape[0] == 1
        if keys.shape[2] != (rows if packed else 1):
            raise KVTierError(f"Appending to blocks: {rows} rows of one token each, but keys are {list(keys.shape)}.")
        self.appender = appender
        self._rows = rows
        self._key_shape, self._value_shape, self._dtype = keys.shape, values.shape, keys.dtype
        self._key_strides, self._value_strides = keys.stride(), values.stride()
        spans = [(0, 0, 0, row, 1) if packed else (0, 0, row, 0, 1) for row in range(rows)]
        self._words = memoryview(array("q", [word for span in spans for word in span]))
        address = self._words.obj.buffer_info()[0]  # type: ignore[attr-defined]
        sizes = (keys.shape[0], keys.shape[2], *_strides(keys), *_strides(values))
        self._problem = _Problem(0, 0, address, rows, *sizes, *appender._sizes)
        self._reference = ctypes.byref(self._problem)
        self._function = library_with_gil().kvtier_append

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[int], offsets: int | Sequence[int]
    ) -> bool:
        """Copy tokens like those that this was made for; see `Appender.append_token`.

        Returns:
            False, and nothing done, if they are not like those.

        Raises:
            KVTierError: an offset beyond its block; nothing is written.
        """
        if len(blocks) != self._rows:
            return False
        if isinstance(offsets, int):
            offsets = (offsets,) * self._rows
        self._words[_BLOCK::_WORDS] = memoryview(array("q", blocks))
        self._words[_OFFSET::_WORDS] = memoryview(array("q", offsets))
        return self.repeat(keys, values)

    def repeat(self, keys: torch.Tensor, values: torch.Tensor, offset: int | None = None) -> bool:
        """`write` into the blocks of the last `write`. Returns and raises what that does.

        Args:
            keys, values: as of `write`.
            offset: the token of each block to write; None: as in the last call.
        """
        # Written out, as it runs once per layer and token.
        if not (
            keys.shape == self._key_shape
            and values.shape == self._value_shape
            and keys.stride() == self._key_strides
            and values.stride() == self._value_strides
            and keys.dtype is values.dtype is self._dtype
            and keys.is_cpu
            and values.is_cpu
        ):
            return False
        if offset is not None:
            if self._rows == 1:
                self._words[_OFFSET] = offset
            else:
                self._words[_OFFSET::_WORDS] = memoryview(array("q", (offset,) * self._rows))
        problem = self._problem
        problem.keys = keys.data_ptr()
        problem.values = values.data_ptr()
        error = self._function(self._reference)
        if error:
            _check(error)
        return True


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Of row, head and token, in bytes."""
    row, head, token, _ = x.stride()
    size = x.element_size()
    return row * size, head * size, token * size


def _check(error: int) -> None:
    if error:
        raise KVTierError("Appending to blocks: a span is not within its block, or not within the new tokens.")
