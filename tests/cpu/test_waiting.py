"""A call that was submitted may be waited for by any thread, several at once too."""

from __future__ import annotations

import threading

import pytest
import torch
from problems import Case, Paged, Result, Spec

from kvtier.cpu import native

pytestmark = pytest.mark.usefixtures("kernel")


def test_any_number_of_threads_may_wait_at_once() -> None:
    case = Case(Spec(lengths=(4000, 3000), seed=1))
    paged, expected = Paged(case), Result(case.spec)
    native.attend(
        paged.shape, case.query, paged.sequences(), case.params, threads=1, out=expected.out, lse=expected.lse
    )
    for _ in range(50):
        result = Result(case.spec)
        future = native.submit(
            paged.shape, case.query, paged.sequences(), case.params, threads=1, out=result.out, lse=result.lse
        )
        seen: list[torch.Tensor] = []
        start = threading.Barrier(4)

        def wait(
            future: native.Future = future, seen: list[torch.Tensor] = seen, start: threading.Barrier = start
        ) -> None:
            start.wait()
            future.done()
            seen.append(future.wait()[0].clone())

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert future.done()
        assert len(seen) == 4
        assert all(torch.equal(x, expected.out) for x in seen)
