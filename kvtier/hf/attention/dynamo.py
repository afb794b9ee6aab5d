"""What `torch.compile` must leave alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def keep_out() -> None:
    """Let Dynamo compile nothing of kvtier, in this process.

    It compiles what runs between its graphs too, function by function. There an event's `query` becomes a constant, and
    a write into a slab is made up for later, perhaps over its neighbours, while copies are under way. Functions marked
    one by one (`torch.compiler.disable`) would cost each layer some microseconds.
    """
    try:
        # Transformers has imported it by now.
        from torch._dynamo import trace_rules

        trace_rules.add("kvtier")
    except Exception as error:  # no public name: a later torch may do without
        warnings.warn(
            f"torch {torch.__version__} cannot be told to leave kvtier out of `torch.compile` ({error}): do not "
            "compile a model that uses TieredKVCache.",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def traces(function: Callable[..., Any], *, in_place_of: Callable[..., Any]) -> bool:
    """Let Dynamo trace `function` where `in_place_of`, one of kvtier's that it must leave alone, is called.

    Returns:
        Whether this torch can be told so.
    """
    try:
        torch.compiler.substitute_in_graph(in_place_of, skip_signature_check=True)(function)
    except Exception:  # as above: compiled models come first, and a shorter way is no more than that
        return False
    return True
