"""The data of `pylm`: the Python standard library as text, its tokenizer, and packed sequences."""

from __future__ import annotations

import random
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"

# Folders that are not library code, or are tables and quoted prose rather than Python.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo"),
    *("lib2to3", "pydoc_data", "encodings", "__phello__"),
}
# Files that Python's build writes; they hold the folder names of one machine.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass
class Corpus:
    """Tokenized documents: a list to shuffle for training, one fixed stream held out."""

    train: list[Tensor]
    heldout: Tensor
    heldout_bytes: int
    heldout_names: list[str]


def read_library() -> dict[str, str]:
    """Return the text of the standard library's modules by relative file name, in fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(SKIPPED_PREFIXES):
            continue
        with tokenize.open(path) as file:  # honours the file's own coding line
            texts["/".join(parts)] = file.read()
    return texts


def is_heldout(name: str, one_in: int) -> bool:
    """Decide by name alone, so that the choice is the same in every run and on every machine."""
    return zlib.crc32(name.encode()) % one_in == 0


def train_tokenizer(texts: list[str], vocab: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE. Bytes are its alphabet, so any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_corpus(texts: dict[str, str], tokenizer: PreTrainedTokenizerFast, one_in: int) -> Corpus:
    """Tokenize whole files, each behind an end-of-text token, and set some of them apart."""
    ids = {
        name: torch.tensor([tokenizer.eos_token_id, *tokenizer(text, verbose=False)["input_ids"]])
        for name, text in texts.items()
    }
    names = [name for name in texts if is_heldout(name, one_in)]
    return Corpus(
        train=[ids[name] for name in texts if name not in names],
        heldout=torch.cat([ids[name] for name in names]),
        heldout_bytes=sum(len(texts[name].encode()) for name in names),
        heldout_names=names,
    )


def windows(documents: list[Tensor], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield packed sequences for ever; every epoch cuts a fresh order of the documents."""
    while True:
        stream = torch.cat(rng.sample(documents, len(documents)))
        start = rng.randrange(length)
        starts = list(range(start, len(stream) - length, length))
        if not starts:
            raise ValueError(f"the library is shorter than one sequence of {length} tokens")
        rng.shuffle(starts)
        yield from (stream[i : i + length] for i in starts)
