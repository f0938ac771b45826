"""What `penstock doctor` says of a server of a model."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.launch.commands.doctor import Unfit, check_endpoint


@contextmanager
def server(status: int, body: bytes, seen: list[str]) -> Iterator[str]:
    """Answers every request alike; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1"
        finally:
            http.shutdown()
            thread.join()


def test_a_server_that_lists_its_models_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    body = json.dumps({"data": [{"id": "tiny"}, {"id": "small"}]}).encode()
    with server(200, body, seen) as url:
        told = check_endpoint(f"{url}/")
    assert told.endswith("tiny, small")
    assert "sk-hidden" not in told
    assert seen == ["/v1/models Bearer sk-hidden"]


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"", "answers 401; set OPENAI_API_KEY"),
        (404, b"", "answers 404; is it the address that ends in /v1"),
        (200, b"<html>", "lists no models"),
        (200, b'{"data": 7}', "lists no models"),
    ],
)
def test_one_that_does_not_is_told_with_what_to_do(status: int, body: bytes, why: str) -> None:
    with server(status, body, []) as url, pytest.raises(Unfit, match=why) as told:
        check_endpoint(url.replace("http://", "http://me:secret@"))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("url", ["ftp://here/v1", "here:80", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Unfit, match="is no address"):
        check_endpoint(url)


def test_a_port_without_a_listener_is_told() -> None:
    with pytest.raises(Unfit, match="does not answer: .*is it started"):
        check_endpoint("http://127.0.0.1:9/v1")
