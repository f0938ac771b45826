"""Rewards from an HTTP endpoint of yours.

    POST URL   {"samples": [{"prompt": "…" or [{"role": …, "content": …}], "response": "…"}, …]}
               and in a sample "cut_short": true where the limit on its length ended the response
    200        {"rewards": [0.5, null, …], "model": "…"}      null: no reward;  model: optional, any text

What may pass by itself (no connection, 408, 429, 5xx) is asked again until `deadline_s` is over; anything
else is an error at once. Redirects are not followed.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import httpx2

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted, full_jitter, retry
from penstock.workloads.language.prompt import plain
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    Rewards,
    Sample,
    ScoredBy,
    Unavailable,
    checked,
)

DEADLINE_S: Final = 30.0
MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
_LATER: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_SHOWN: Final = 200


# Its lines, one for each call, would grow the log of an actor for as long as it runs.
logging.getLogger("httpx2").setLevel(logging.WARNING)


class HttpRewards:
    """A reward source behind HTTP.

    deadline_s: of a call with all its repetitions; attempt_s: of the wait for one answer.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        attempt_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ConfigurationError for what is no http:// or https:// URL."""
        parsed = _parse(url)
        self._url, self._shown = parsed, f"{parsed.scheme}://{_place(parsed)}"
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self._client = httpx2.Client(timeout=attempt_s or deadline_s / 2, headers=dict(headers or {}))

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Their rewards; raises BadReward, BadSample (the endpoint refuses the request), Unavailable."""
        body = {"samples": [_shown_as(one) for one in samples]}
        try:
            reply = retry(
                partial(self._ask, body),
                retryable=lambda error: isinstance(error, httpx2.TransportError | _Later),
                stop=self._closed,
                give_up_s=self._deadline_s,
                delays=full_jitter(cap_s=1.0),
            )
        except Interrupted as error:
            raise Unavailable(f"{self._shown}: the source was closed") from error
        except (httpx2.TransportError, _Later) as error:
            raise Unavailable(f"{self._shown}: no answer within {self._deadline_s:g} s: {error}") from error
        values = reply.get("rewards")
        if not isinstance(values, list):
            raise BadReward(f"{self._shown}: the reply holds no list `rewards`")
        model = reply.get("model")
        name = f"{self._shown} {model}" if isinstance(model, str) else self._shown
        return Rewards(checked(values, len(samples), self._shown), ScoredBy(name=name))

    def close(self) -> None:
        """End the connection and what waits for it."""
        self._closed.set()
        self._client.close()

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._client.stream("POST", self._url, json=body) as reply:
            data = _read(reply, self._shown)
        if reply.status_code in _LATER or reply.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _Later(f"status {reply.status_code}")
        if reply.status_code != HTTPStatus.OK:
            text = data[:_SHOWN].decode(errors="replace")
            raise BadSample(f"{self._shown}: status {reply.status_code}: {text}")
        return _object(data, self._shown)


def _shown_as(sample: Sample) -> dict[str, Any]:
    shown = {"prompt": plain(sample.prompt), "response": sample.response}
    return {**shown, "cut_short": True} if sample.cut_short else shown


class _Later(Exception):
    """An answer that may be another one soon."""


def _parse(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigurationError(f"reward={url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"reward={url!r}: write http://HOST/PATH or https://HOST/PATH")
    return parsed


def _place(url: httpx2.URL) -> str:
    """Return what messages show of it: no name, no password, no query."""
    port = "" if url.port is None else f":{url.port}"
    return f"{url.host}{port}{url.path}"


def _read(reply: httpx2.Response, whose: str) -> bytes:
    """The body; raises BadReward for one above the limit, before the rest of it is read."""
    data = bytearray()
    for chunk in reply.iter_bytes():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise BadReward(f"{whose}: a reply above {MAX_REPLY_BYTES} bytes")
    return bytes(data)


def _object(data: bytes, whose: str) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadReward(f"{whose}: the reply is no JSON: {error}") from error
    if not isinstance(reply, dict):
        raise BadReward(f"{whose}: the reply is no object")
    return reply
