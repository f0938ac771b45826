"""Rewards from elsewhere: a reward service, over one connection, or an HTTP endpoint.

Scores are a function of the samples, so a call whose reply was lost is sent again. A call with more samples
than one request holds is sent as several requests; if the model changes between them, all are sent again.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import grpc
import httpx2

from penstock.config.settings import ConfigurationError
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MESSAGE_OVERHEAD_BYTES
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.rpc.gate import is_repeatable, text_of
from penstock.runtime.retry import Interrupted, full_jitter, retry
from penstock.v1 import reward_pb2 as pb
from penstock.v1.reward_pb2_grpc import RewardServiceStub
from penstock.workloads.language.prompt import plain
from penstock.workloads.language.reward.reward_source import (
    MAX_REWARD_SAMPLES,
    BadReward,
    BadSample,
    Rewards,
    Sample,
    ScoredBy,
    Unavailable,
    checked,
    model_from_proto,
    rewards_from_proto,
    sample_to_proto,
)
from penstock.workloads.language.settings import as_configuration_error

DEADLINE_S: Final = 30.0
PLAINTEXT: Final = Credentials()
"""On loopback and unix sockets."""
_LEAST_S: Final = 0.001
_MAX_BYTES: Final = MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES


class RewardClient:
    """A client of a reward service for any number of threads. Connects at the first call.

    address: HOST:PORT or unix:/path. deadline_s: of a call with all its requests and repetitions. Raises
    ValueError for a malformed address, and for plaintext that the credentials do not allow.
    """

    def __init__(
        self, address: str, *, credentials: Credentials = PLAINTEXT, deadline_s: float = DEADLINE_S
    ) -> None:
        self._address, self._deadline_s = address, deadline_s
        self._source = f"the reward service at {address}"
        self._channel = open_channel(address, credentials)
        self._stub = RewardServiceStub(self._channel)
        self._closed = threading.Event()

    def describe(self) -> ScoredBy:
        until_s = time.monotonic() + self._deadline_s
        reply = self._call(self._stub.DescribeModel, pb.DescribeModelRequest(), until_s)
        return model_from_proto(reply.model)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return their rewards, all of one model; raises BadSample, BadReward, Unavailable."""
        if not samples:
            return Rewards((), self.describe())
        until_s = time.monotonic() + self._deadline_s
        while True:
            parts = [
                rewards_from_proto(
                    self._call(self._stub.Score, request, until_s), len(request.samples), self._source
                )
                for request in _requests(samples)
            ]
            if len({part.by for part in parts}) == 1:
                return Rewards(tuple(value for part in parts for value in part.values), parts[0].by)

    def judge(self, sample: Sample) -> dict[str, float]:
        """Return the predicted ratings of a response by head, 0 to 1.

        Raises BadSample, also for a model of one score; BadReward; Unavailable.
        """
        until_s = time.monotonic() + self._deadline_s
        request = pb.ScoreRequest(samples=[sample_to_proto(sample)])
        reply = self._call(self._stub.Judge, request, until_s)
        if len(reply.judgements) != 1:
            raise BadReward(f"{self._source}: {len(reply.judgements)} judgements of one sample")
        shares = dict(reply.judgements[0].shares)
        checked(list(shares.values()), len(shares), self._source)
        return shares

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _attempt(self, call: Any, request: Any, until_s: float) -> Any:
        # One attempt takes at most half of the time, so that a lost call is made again.
        timeout_s = max(_LEAST_S, min(until_s - time.monotonic(), self._deadline_s / 2))
        try:
            reply = call(request, timeout=timeout_s)
        except ValueError as error:  # how a channel says that it was closed just now
            if self._closed.is_set():
                raise Interrupted from error
            raise
        if not isinstance(reply, pb.DescribeModelReply):
            refusal = Refusal.from_proto(reply.refusal)
            if refusal is not None:
                raise Refused(refusal)
        return reply

    def _call(self, call: Any, request: Any, until_s: float) -> Any:
        try:
            return retry(
                lambda: self._attempt(call, request, until_s),
                retryable=lambda error: is_repeatable(error) or _is_overloaded(error),
                stop=self._closed,
                give_up_s=max(0.0, until_s - time.monotonic()),
                delays=full_jitter(cap_s=1.0),
            )
        except Interrupted as error:
            raise Unavailable(f"{self._source}: the client was closed") from error
        except Refused as error:
            if _is_overloaded(error):
                raise Unavailable(f"{self._source}: {error}") from error
            raise BadSample(f"{self._source}: {error}") from error
        except grpc.RpcError as error:
            if is_repeatable(error):
                raise Unavailable(
                    f"{self._source}: no answer within {self._deadline_s:g} s: {text_of(error)}"
                ) from error
            raise BadReward(f"{self._source}: {text_of(error)}") from error


def _is_overloaded(error: Exception) -> bool:
    return isinstance(error, Refused) and error.refusal.reason is Reason.OVERLOADED


def _requests(samples: Sequence[Sample]) -> Iterator[pb.ScoreRequest]:
    """Yield the fewest requests that hold the samples in order; raises BadSample for a too large one."""
    request, size = pb.ScoreRequest(), 0
    for index, sample in enumerate(samples):
        message = sample_to_proto(sample)
        needed = message.ByteSize() + 8
        if needed > _MAX_BYTES:
            raise BadSample(f"samples[{index}]: {needed} bytes, at most {_MAX_BYTES}")
        if len(request.samples) == MAX_REWARD_SAMPLES or size + needed > _MAX_BYTES:
            yield request
            request, size = pb.ScoreRequest(), 0
        request.samples.append(message)
        size += needed
    yield request


# ---- Rewards from an HTTP endpoint.

MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
_LATER: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_SHOWN: Final = 200


# It logs a line for each call.
logging.getLogger("httpx2").setLevel(logging.WARNING)


class HttpRewards:
    """A reward source behind HTTP. deadline_s: of a call with all its repetitions."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = DEADLINE_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Raise ConfigurationError for text that is no http:// or https:// URL."""
        with as_configuration_error(f"reward={url!r}", httpx2.InvalidURL):
            parsed = httpx2.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigurationError(f"reward={url!r}: write http://HOST/PATH or https://HOST/PATH")
        port = "" if parsed.port is None else f":{parsed.port}"
        self._url, self._shown = parsed, f"{parsed.scheme}://{parsed.host}{port}{parsed.path}"
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self._client = httpx2.Client(timeout=deadline_s / 2, headers=dict(headers or {}))

    def score(self, samples: Sequence[Sample]) -> Rewards:
        """Return their rewards; raises BadReward, BadSample where the endpoint refuses, Unavailable."""
        body = {
            "samples": [
                {"prompt": plain(one.prompt), "response": one.response}
                | ({"cut_short": True} if one.cut_short else {})
                for one in samples
            ]
        }
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
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadReward(f"{self._shown}: the reply is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadReward(f"{self._shown}: the reply is no object")
        return found


class _Later(Exception):
    """A status after which the call is repeated."""


def _read(reply: httpx2.Response, source: str) -> bytes:
    data = bytearray()
    for chunk in reply.iter_bytes():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise BadReward(f"{source}: a reply above {MAX_REPLY_BYTES} bytes")
    return bytes(data)
