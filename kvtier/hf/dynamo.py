"""What `torch.compile` must leave alone."""

from __future__ import annotations

import functools
import warnings

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
