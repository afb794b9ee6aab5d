"""A page of another origin may ask where the server says so, and reads why it was refused."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from servers import NAME, Running, Start

from kvtier.cli import serve
from kvtier.cli.main import main

PAGE, OTHER = "http://localhost:3000", "http://localhost:3001"


def asked(running: Running, path: str, origin: str, *, key: str = "", body: Any = None, **headers: str) -> Any:
    """The answer to a request as a browser sends it."""
    headers |= {"Origin": origin, "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    method = "OPTIONS" if "Access-Control-Request-Method" in headers else "GET" if body is None else "POST"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{running.url}/{path}", data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        return error


def allowed(answer: Any) -> str | None:
    return answer.headers.get("Access-Control-Allow-Origin")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def open_to_page(start: Start) -> Iterator[Running]:
    with start(origins=(PAGE,), keys={"secret": "alice"}) as server:
        yield server


def test_a_browser_asks_whether_it_may_without_a_key(open_to_page: Running) -> None:
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = asked(open_to_page, "chat/completions", PAGE, **wish)
    assert (answer.status, allowed(answer)) == (200, PAGE)
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
    answer = asked(open_to_page, "chat/completions", OTHER, **wish)
    assert (answer.status, allowed(answer)) == (400, None)


def test_a_page_of_a_public_address_may_ask_a_server_of_a_private_one(open_to_page: Running) -> None:
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    answer = asked(open_to_page, "chat/completions", PAGE, **wish)
    assert (answer.status, answer.headers["Access-Control-Allow-Private-Network"]) == (200, "true")
    assert asked(open_to_page, "chat/completions", OTHER, **wish).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_reads_its_answer(open_to_page: Running, stream: bool) -> None:
    body = {"model": NAME, "prompt": "def f(", "max_tokens": 4, "temperature": 0, "stream": stream}
    answer = asked(open_to_page, "completions", PAGE, key="secret", body=body)
    assert (answer.status, allowed(answer)) == (200, PAGE)
    assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"].lower()
    assert (b"[DONE]" in answer.read()) == stream
    assert allowed(asked(open_to_page, "completions", OTHER, key="secret", body=body)) is None


def test_a_page_reads_why_it_was_refused(open_to_page: Running) -> None:
    answer = asked(open_to_page, "models", PAGE, key="wrong")
    assert (answer.status, allowed(answer)) == (401, PAGE)
    assert "error" in json.loads(answer.read())


def test_any_origin_or_none(start: Start, running: Running) -> None:
    with start(origins=("*",)) as server:
        assert allowed(asked(server, "models", OTHER)) == "*"
    assert allowed(asked(running, "models", PAGE)) is None
    assert asked(running, "models", PAGE, **{"Access-Control-Request-Method": "GET"}).status == 405


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000/",
        "localhost:3000",
        "http://Page.example",
        "",
        "http://a@b",
        "http://:80",
        "https://*.example",
    ],
)
def test_what_is_no_origin_is_said(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "none", "--allowed-origin", origin])
    assert f"{origin!r} is no origin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *(("https://a.example:443", "https://a.example"), ("http://[::1]:80", "http://[::1]")),
        *(
            (x, x)
            for x in ("https://a.example:80", "http://a.example:443", "http://a.example:8080", "https://[::1]:4430")
        ),
        *((x, x) for x in ("*", "null", "chrome-extension://abc", "app://a:443")),
    ],
)
def test_an_origin_is_as_browsers_name_it_without_the_port_of_its_scheme(given: str, named: str) -> None:
    assert serve._origin(given) == named


@pytest.mark.parametrize(("keys", "said"), [(None, True), ("keys.txt", False)])
def test_where_any_page_may_ask_without_a_key_it_is_said(
    keys: str | None, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args = Namespace(model="m", host="127.0.0.1", api_key_file=keys, allowed_origin=["*"])
    serve._warn(args, Namespace(chat_template="x"))
    assert ("Any page that a browser here shows may ask." in capsys.readouterr().err) == said
