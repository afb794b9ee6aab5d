"""How many positions a model has, and whether there is nothing beyond them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvtier.hf.models.generation import inner


def count_of_positions(model: Any) -> int | None:
    """Positions that a model was made for; None: its config does not say. Rotary ones may go on beyond them."""
    found = getattr(inner(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(found) if isinstance(found, int) and found > 0 else None


def table_of_positions(model: Any) -> int | None:
    """Positions of a model that has a table of them, learned (GPT-2) or computed when it is made (GPT-J), beyond which
    a forward fails, and on CUDA every later one, too; None: it has none."""
    most = count_of_positions(model)
    found = list[int]()
    model = inner(model)
    text = (model.get_decoder() if hasattr(model, "get_decoder") else None) or model
    for name, table in (*text.named_modules(), *text.named_buffers()):
        name = name.rpartition(".")[2]
        if "pos" not in name and name != "wpe":
            continue
        if isinstance(table, nn.Embedding):
            before = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from there
            rows, before = table.num_embeddings, getattr(table, "offset", before)
        elif isinstance(table, torch.Tensor) and table.dim() == 2:
            rows, before = len(table), 0
        else:
            continue
        if most in (rows, rows - before):  # and no other table, as that of an encoder of images
            found.append(rows - before)
    return min(found, default=None)
