"""The index finds, to the token, what a comparison with every entry finds."""

from __future__ import annotations

import random

import pytest

from kvtier.conversation.index import PrefixIndex, common, packed, unpacked


def brute(entries: dict[int, tuple[str, list[int]]], key: str, ids: list[int]) -> int:
    def alike(other: list[int]) -> int:
        n = 0
        while n < min(len(ids), len(other)) and ids[n] == other[n]:
            n += 1
        return n

    return max((alike(other) for where, other in entries.values() if where == key), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_the_longest_common_beginning(seed: int) -> None:
    rng = random.Random(seed)
    index: PrefixIndex[int] = PrefixIndex()
    entries: dict[int, tuple[str, list[int]]] = {}

    def ids() -> list[int]:
        if entries and rng.random() < 0.7:
            _, other = rng.choice(list(entries.values()))
            return other[: rng.randint(0, len(other))] + [rng.randrange(3) for _ in range(rng.choice((0, 0, 1, 5)))]
        return [rng.randrange(3) for _ in range(rng.randint(0, 12))]

    for number in range(300):
        key = rng.choice("ab")
        if entries and rng.random() < 0.3:
            gone = rng.choice(list(entries))
            del entries[gone]
            index.remove(gone)
        else:
            other = rng.choice(list(entries)) if entries and rng.random() < 0.2 else number
            entries[other] = (key, ids())
            index.add(key, packed(entries[other][1]), other)
        probe = ids()
        length, found = index.find(key, packed(probe))
        assert length == brute(entries, key, probe)
        assert (found is None) == (length == 0)
        if found is not None:
            where, other_ids = entries[found]
            assert where == key
            assert other_ids[:length] == probe[:length]
        whole = {n for n, (where, other) in entries.items() if where == key and probe[: len(other)] == other}
        listed = list(index.prefixes(key, packed(probe)))
        assert {entry for _, entry in listed} == whole
        assert [n for n, _ in listed] == sorted((len(entries[entry][1]) for _, entry in listed), reverse=True)
        begun = {n for n, (where, other) in entries.items() if where == key and other[: len(probe)] == probe}
        assert sorted(index.continuing(key, packed(probe))) == sorted(begun)
        assert len(index) == len(entries)
    for number in list(entries):
        index.remove(number)
    assert not index._roots, "empty nodes are left"


@pytest.mark.parametrize("at", [0, 1, 5, 63, 64, 1000])
def test_sequences_are_compared_to_the_token(at: int) -> None:
    a = list(range(1001))
    b = [*a[:at], -1, *a[at + 1 :]]
    assert common(packed(a), packed(b)) == at
    assert common(packed(a), packed(a[:at])) == at
    assert unpacked(packed(a)) == a
