"""The text of a prompt as 1,536 numbers: by hashing, or by a server of embeddings. Loads no model."""

import hashlib
import itertools
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.rpc.address import is_local
from penstock.runtime.retry import full_jitter, retry

WIDTH: Final = 1536
"""Numbers of an embedding."""
_WORD: Final = re.compile(r"\w{1,32}|[^\w\s]")
_GRAMS: Final = (3, 4, 5)
_CACHED_WORDS: Final = 16_384

Rows = NDArray[np.float32]
"""Embeddings, float32 [n, WIDTH]."""
_Places = tuple[NDArray[np.intp], NDArray[np.float32]]


class Embedder(Protocol):
    """Embeds texts; safe for threads."""

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return float32 [n, WIDTH], each of length 1; raises EmbeddingError."""
        ...


class EmbeddingError(Exception):
    """Reports a failure of the source of embeddings; the message names the source, the cause and a remedy."""


class HashingEmbedder:
    """Signed hashing of words and of their 3- to 5-grams (Weinberger et al. 2009).

    A word counts once, however often it occurs; its grams together weigh as much as the word, so that words
    of one stem lie near each other. Equal texts have equal embeddings on every machine.
    """

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return embeddings float32 [n, WIDTH]; a text without any word or mark is all 0."""
        rows = np.zeros((len(texts), WIDTH), np.float32)
        for index, text in enumerate(texts):
            words = dict.fromkeys(_WORD.findall(text.lower()))
            if words:
                places, signs = zip(*(_places(word) for word in words), strict=True)
                counted = np.bincount(np.concatenate(places), np.concatenate(signs), WIDTH)
                rows[index] = counted / max(float(np.linalg.norm(counted)), 1e-12)
        return rows


@lru_cache(_CACHED_WORDS)
def _places(word: str) -> _Places:
    """Return the indices at which a word and its grams are counted, and their signed weights."""
    edged = f"<{word}>"
    grams = [edged[at : at + size] for size in _GRAMS for at in range(len(edged) - size + 1)]
    hashes = [_hash(part) for part in (edged, *grams)]
    weights = [1.0, *[len(grams) ** -0.5] * len(grams)]
    signs = [weight if number >> 63 else -weight for number, weight in zip(hashes, weights, strict=True)]
    return np.array([number % WIDTH for number in hashes], np.intp), np.array(signs, np.float32)


def _hash(part: str) -> int:
    return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")


# ---- Embeddings from a server with OpenAI's API, and a cache of them.

DEADLINE_S: Final = 30.0
MAX_REPLY_BYTES: Final = 32 * 1024 * 1024
_BATCH: Final = 64
_REMEMBERED: Final = 4_096
_LATER: Final = (408, 429)
_SHOWN: Final = 200
_MAP_SEED: Final = 1536


class HttpEmbedder:
    """An `Embedder` behind HTTP; safe for threads, which take turns.

    It caches the newest 4,096 embeddings (24 MiB) by the sha256 of their texts. Temporary failures (no
    connection, 408, 429, 5xx) are retried until `deadline_s` is over.
    """

    def __init__(self, url: str, *, model: str, key_file: str = "", deadline_s: float = DEADLINE_S) -> None:
        """url: of the route. key_file: holds the key alone; "": no key. deadline_s: of a call, in seconds."""
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
                f"embedding_url={self._shown}: the key would cross the network in plaintext; use https://"
            )
        self._known: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._turn = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Rows:
        """Return embeddings float32 [n, WIDTH] of unit length; raises EmbeddingError."""
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        with self._turn:
            missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
            asked = list(missing.values())
            batches = [self._ask(asked[start : start + _BATCH]) for start in range(0, len(asked), _BATCH)]
            fresh = dict(zip(missing, itertools.chain.from_iterable(batches), strict=True))
            rows = np.zeros((len(texts), WIDTH), np.float32)
            for index, key in enumerate(keys):
                rows[index] = fresh[key] if key in fresh else self._known[key]
            self._known.update(fresh)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return rows

    def _ask(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        body = json.dumps({"model": self._model, "input": list(texts), "encoding_format": "float"}).encode()
        until_s = time.monotonic() + self._deadline_s
        try:
            reply = retry(
                lambda: self._post(body, until_s),
                retryable=lambda error: isinstance(error, _Later),
                stop=threading.Event(),
                give_up_s=self._deadline_s,
                delays=full_jitter(cap_s=2.0),
            )
        except _Later as error:
            raise EmbeddingError(
                f"{self._shown}: no embeddings within {self._deadline_s:g} s: {error}"
            ) from error
        return read_reply(reply, len(texts), self._shown)

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
    """Reports a temporary failure."""


def read_reply(data: bytes, count: int, whose: str) -> list[NDArray[np.float32]]:
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
    """Return numbers float64 [d], d at most WIDTH, as float32 [WIDTH] of unit length."""
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
