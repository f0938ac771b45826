"""Embeddings from a server that speaks as OpenAI's does, and what is remembered of them.

    POST URL   {"model": "…", "input": ["…", …], "encoding_format": "float"}    Authorization: Bearer KEY
    200        {"data": [{"index": 0, "embedding": [0.1, …]}, …]}

A model of fewer numbers than 1,536 is spread over them by a fixed map that keeps lengths and angles.
"""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.rpc.address import is_local
from penstock.workloads.prompts.embeddings import WIDTH, EmbeddingError, Rows

DEADLINE_S: Final = 30.0
MAX_REPLY_BYTES: Final = 32 * 1024 * 1024
_BATCH: Final = 64
_REMEMBERED: Final = 4_096
_LATER: Final = (408, 429)
_SHOWN: Final = 200
_MAP_SEED: Final = 1536


class HttpEmbedder:
    """An `Embedder` behind HTTP; safe for threads, which take turns.

    The newest 4,096 embeddings (24 MiB) are remembered by the sha256 of their texts. What may pass by itself
    (no connection, 408, 429, 5xx) is asked again until `deadline_s` is over.
    """

    def __init__(self, url: str, *, model: str, key_file: str = "", deadline_s: float = DEADLINE_S) -> None:
        """Describe where to ask.

        Args:
            url: of the route, such as https://HOST/v1/embeddings.
            model: what the server calls the model.
            key_file: a file with the key and nothing else; "": none is sent.
            deadline_s: of a call with all its repetitions.

        Raises:
            ConfigurationError: no such URL, no readable key, or one that would leave this machine in plain
                words.
        """
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigurationError("embedding_url: holds a name or a password; name an embedding_key_file")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"embedding_url={url!r}: write http://HOST/PATH or https://HOST/PATH")
        self._is_safe, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path or "/"
        self._shown = f"{parts.scheme}://{self._host}{f':{self._port}' if self._port else ''}{self._path}"
        self._model, self._deadline_s = model, deadline_s
        self._headers = {"Content-Type": "application/json"} | _authorization(key_file)
        host = f"[{self._host}]" if ":" in self._host else self._host
        if key_file and not self._is_safe and not is_local(f"{host}:80"):
            raise ConfigurationError(
                f"embedding_url={self._shown}: the key would cross the network in plain words; use https://"
            )
        self._known: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._turn = Lock()

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return embeddings float32 [n, WIDTH] of unit length; raises EmbeddingError."""
        keys = [sha256(text.encode()).digest() for text in texts]
        with self._turn:
            missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
            fresh = dict(zip(missing, self._ask_all(list(missing.values())), strict=True))
            rows = np.zeros((len(texts), WIDTH), np.float32)
            for index, key in enumerate(keys):
                rows[index] = fresh[key] if key in fresh else self._known[key]
            self._known.update(fresh)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return rows

    def _ask_all(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(texts), _BATCH):
            rows += self._ask(texts[start : start + _BATCH])
        return rows

    def _ask(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        body = json.dumps({"model": self._model, "input": list(texts), "encoding_format": "float"}).encode()
        until_s, delay_s = time.monotonic() + self._deadline_s, 0.05
        while True:
            try:
                return read_reply(self._post(body, until_s), len(texts), self._shown)
            except _Later as error:
                if time.monotonic() + delay_s > until_s:
                    raise EmbeddingError(
                        f"{self._shown}: no embeddings within {self._deadline_s:g} s: {error}"
                    ) from error
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 2.0)

    def _post(self, body: bytes, until_s: float) -> bytes:
        kind = HTTPSConnection if self._is_safe else HTTPConnection
        line = kind(self._host, self._port, timeout=max(0.1, until_s - time.monotonic()))
        try:
            line.request("POST", self._path, body, self._headers)
            reply = line.getresponse()
            data = reply.read(MAX_REPLY_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise _Later(f"{type(error).__name__}: {error}") from error
        finally:
            line.close()
        if reply.status in _LATER or reply.status >= 500:
            raise _Later(f"status {reply.status}")
        if reply.status != 200:
            raise EmbeddingError(
                f"{self._shown}: status {reply.status}: {data[:_SHOWN].decode(errors='replace')}"
            )
        if len(data) > MAX_REPLY_BYTES:
            raise EmbeddingError(f"{self._shown}: a reply above {MAX_REPLY_BYTES} bytes; ask another server")
        return data


class _Later(Exception):
    """An answer that may be another one soon."""


def read_reply(data: bytes, count: int, whose: str) -> list[NDArray[np.float32]]:
    """Return the embeddings of a reply, float32 [WIDTH] each, of unit length.

    Raises EmbeddingError that names what is wrong with it: no JSON, too few, out of order, not finite, all 0,
    or more numbers than WIDTH.
    """
    try:
        held: Any = json.loads(data)
        items = sorted(held["data"], key=lambda item: int(item["index"]))
        rows = [np.asarray(item["embedding"], np.float64) for item in items]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise EmbeddingError(f"{whose}: the reply has no list `data` of embeddings: {error!r}") from error
    if [item["index"] for item in items] != list(range(count)):
        raise EmbeddingError(f"{whose}: {len(rows)} embeddings for {count} texts, or with other indices")
    return [spread(row, whose) for row in rows]


def spread(row: NDArray[np.float64], whose: str) -> NDArray[np.float32]:
    """Return numbers float64 [d], d at most WIDTH, as float32 [WIDTH] of unit length.

    Raises EmbeddingError for another shape, numbers that are not finite, and zeros only.
    """
    if row.ndim != 1 or not 1 <= len(row) <= WIDTH:
        raise EmbeddingError(
            f"{whose}: an embedding of shape {row.shape}; take a model of at most {WIDTH} numbers"
        )
    length = float(np.linalg.norm(row))
    if not math.isfinite(length) or length == 0.0:
        raise EmbeddingError(f"{whose}: an embedding that is all 0 or not finite")
    wide = row / length
    if len(row) < WIDTH:
        wide = wide @ orthonormal(len(row))
    return wide.astype(np.float32)


@lru_cache(4)
def orthonormal(width: int) -> NDArray[np.float64]:
    """Return a fixed map float64 [width, WIDTH] with orthonormal rows."""
    drawn = np.random.default_rng(_MAP_SEED).normal(size=(WIDTH, width))
    rows: NDArray[np.float64] = np.linalg.qr(drawn)[0].T
    return rows


def _authorization(key_file: str) -> dict[str, str]:
    if not key_file:
        return {}
    try:
        key = Path(key_file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"embedding_key_file={key_file!r}: cannot be read as a key") from error
    if not key or not key.isprintable():
        raise ConfigurationError(f"embedding_key_file={key_file!r}: holds no key of one line")
    return {"Authorization": f"Bearer {key}"}
