"""How a server is can be seen at any time: neither a step nor prompts that are read keep anybody waiting."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from servers import NAME, Running, Start

PROMPT = "def first(items):\n"


def seen(running: Running, path: str) -> str:
    url = running.url.removesuffix("/v1") + path
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def sample(text: str, name: str) -> float:
    (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(f"kvtier:{name}{{")]
    return float(value)


def test_health_and_metrics_are_told_while_a_forward_holds_the_memory(start: Start, trained: tuple[Any, Any]) -> None:
    with start() as running:
        there, go_on = threading.Event(), threading.Event()
        memory = running.engine.memory

        def hold(*_: Any) -> None:
            with memory.lock:
                there.set()
                assert go_on.wait(180)

        before = sample(seen(running, "/metrics"), "host_budget_bytes")
        handle = trained[0].register_forward_pre_hook(hold)
        asking = threading.Thread(
            target=lambda: running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2), daemon=True
        )
        try:
            asking.start()
            assert there.wait(120)
            assert '"running":1' in seen(running, "/health")
            text = seen(running, "/metrics")
            assert sample(text, "num_requests_running") == 1
            assert sample(text, "host_budget_bytes") == before
        finally:
            handle.remove()
            go_on.set()
        asking.join(120)
        ended = time.monotonic() + 120  # it is counted just behind its last token
        while sample(seen(running, "/metrics"), "num_requests_running") and time.monotonic() < ended:
            time.sleep(0.01)
        assert sample(seen(running, "/metrics"), "num_requests_running") == 0


def test_health_and_metrics_are_told_while_long_prompts_are_read(running: Running) -> None:
    go_on, readers = threading.Event(), running.server.manager._readers
    try:
        for _ in range(4):
            readers.submit(go_on.wait, 180)
        assert '"status":"ok"' in seen(running, "/health")
        assert sample(seen(running, "/metrics"), "engine_alive") == 1
    finally:
        go_on.set()


def test_every_metric_is_on_the_page_of_the_server(running: Running) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text("utf-8")
    names = re.findall(r"^# TYPE kvtier:(\w+) ", seen(running, "/metrics"), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if f"`{name}" not in page and f" {name}" not in page] == []
