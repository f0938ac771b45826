"""Embeddings from a server of OpenAI's form: a real one, on loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.embeddings import WIDTH, EmbeddingError, HttpEmbedder, orthonormal, read_reply


class Server(ThreadingHTTPServer):
    """Answers with numbers of its texts, 384 of them; notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}/v1/embeddings"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        """Answer in the reverse order, as a server may, or with a status that the test asks for."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        status = self.server.statuses.pop() if self.server.statuses else 200
        data = [{"index": index, "embedding": numbers(text)} for index, text in enumerate(body["input"])]
        reply = json.dumps(
            {"object": "list", "data": data[::-1]} if status == 200 else {"error": "no"}
        ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Say nothing."""


def numbers(text: str) -> list[float]:
    """What stands for a model: the same for equal texts."""
    drawn: list[float] = np.random.default_rng(list(text.encode())).normal(size=384).tolist()
    return drawn


@contextmanager
def serving() -> Iterator[Server]:
    """A server while the block runs."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_texts_become_rows_that_keep_angles_and_are_asked_for_once(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-key\n")
    with serving() as server:
        embedder = HttpEmbedder(server.url, model="small", key_file=str(tmp_path / "key"))
        rows = embedder.embed(["one", "two", "one"])
        again = embedder.embed(["two", "three"])
        asked, keys = server.asked, server.keys
    assert rows.shape == (3, WIDTH)
    plain = np.array([numbers(text) for text in ("one", "two", "one")])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ rows.T, plain @ plain.T, atol=1e-5)
    np.testing.assert_array_equal(again[0], rows[1])
    assert [one["input"] for one in asked] == [["one", "two"], ["three"]]
    assert asked[0]["model"] == "small"
    assert keys == ["Bearer secret-key"] * 2


def test_what_passes_by_itself_is_asked_again_and_a_refusal_is_not() -> None:
    with serving() as server:
        embedder = HttpEmbedder(server.url, model="small")
        server.statuses = [503, 429]
        assert embedder.embed(["one"]).any()
        server.statuses = [400]
        with pytest.raises(EmbeddingError, match=r"v1/embeddings: status 400"):
            embedder.embed(["two"])
        assert len(server.asked) == 4


def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(EmbeddingError, match=r"v1/embeddings: no embeddings within 0.2 s: Connection"):
        HttpEmbedder(url, model="small", deadline_s=0.2).embed(["one"])


@pytest.mark.parametrize(
    "reply",
    [
        b"no JSON", b"{}", b"[]", b'{"data": 3}', b'{"data": []}', b"[" * 100_000,
        b'{"data": [{"index": 1, "embedding": [1]}]}', b'{"data": [{"index": 0, "embedding": [NaN]}]}',
        b'{"data": [{"index": 0, "embedding": [0, 0]}]}', b'{"data": [{"index": 0, "embedding": "abc"}]}',
        b'{"data": [{"index": 0, "embedding": [[1, 2]]}]}',
        json.dumps({"data": [{"index": 0, "embedding": [1.0] * (WIDTH + 1)}]}).encode(),
    ],
)  # fmt: skip
def test_a_reply_that_holds_no_embeddings_is_an_error_that_names_the_server(reply: bytes) -> None:
    with pytest.raises(EmbeddingError, match=r"^there: "):
        read_reply(reply, 1, "there")


def test_1536_numbers_stay_as_they_are() -> None:
    row = np.arange(1.0, WIDTH + 1)
    reply = json.dumps({"data": [{"index": 0, "embedding": row.tolist()}]}).encode()
    np.testing.assert_allclose(read_reply(reply, 1, "there")[0], row / np.linalg.norm(row), rtol=1e-6)


def test_the_map_is_orthonormal() -> None:
    np.testing.assert_allclose(orthonormal(384) @ orthonormal(384).T, np.eye(384), atol=1e-12)


def test_a_key_never_leaves_the_machine_in_plain_words_and_is_in_no_message(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key")
    for url, file in (
        ("http://example.com/v1", key),
        ("https://me:secret-key@example.com", ""),
        ("ftp://x", ""),
    ):
        with pytest.raises(ConfigurationError, match="embedding") as error:
            HttpEmbedder(url, model="small", key_file=str(file))
        assert "secret-key" not in str(error.value)
    with pytest.raises(ConfigurationError, match="embedding_key_file=.*cannot be read"):
        HttpEmbedder("https://example.com", model="small", key_file=str(tmp_path / "absent"))
