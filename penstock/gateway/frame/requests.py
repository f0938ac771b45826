"""Parts of requests and answers. An error is `{"error": word, "detail": what to do, "field": where or null}`.

    400 insufficient, 401 unauthenticated, 403 forbidden, 404 not_found, 405, 408 too_slow, 409 conflict or
    quota, 413 too_large, 415, 421 wrong_host, 422 invalid, 429 too_many, 500 internal, 503 unavailable

An error repeats nothing of what was sent but the name of a field.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from penstock.gateway.accounts.principal import (
    AccountConflict,
    AccountError,
    BadInput,
    Forbidden,
    NoSuchThing,
    QuotaReached,
    TooManyAttempts,
    Unauthenticated,
)
from penstock.gateway.jobs.job_records import CannotSteer
from penstock.protocol.limits import MIB
from penstock.registry.records import Busy, Conflict, NotAllowed, RegistryError, Unavailable
from penstock.rpc.gate import Exceeded, RateLimits, Rates

log = logging.getLogger(__name__)

CHALLENGE: Final = 'Bearer realm="penstock", Basic realm="penstock", charset="UTF-8"'
MAX_FIELD: Final = 128
"""Characters of a field's name in an answer: what is refused may be a name of any length."""
_WORDS: Final = {
    HTTPStatus.BAD_REQUEST: "bad_request",
    HTTPStatus.UNAUTHORIZED: "unauthenticated",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_TIMEOUT: "too_slow",
    HTTPStatus.CONFLICT: "conflict",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_type",
    HTTPStatus.MISDIRECTED_REQUEST: "wrong_host",
    HTTPStatus.UNPROCESSABLE_ENTITY: "invalid",
    HTTPStatus.TOO_MANY_REQUESTS: "too_many",
    HTTPStatus.INTERNAL_SERVER_ERROR: "internal",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}


class ApiError(HTTPException):
    """An error answer, raised by a route.

    It is an HTTPException, which FastAPI passes on also from where a body is read.

    status: of HTTP. detail: what is wrong and what to do. field: of the request, or None. error: a code for
    programs; None: the one of the status. retry_s: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        field: str | None = None,
        error: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(status, detail)
        self.status = HTTPStatus(status)
        self.field = field
        self.error = error or _WORDS.get(self.status, "error")
        self.retry_s = retry_s

    def response(self) -> Response:
        headers = {}
        if self.status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = CHALLENGE
        if self.retry_s is not None:
            headers["Retry-After"] = str(max(math.ceil(self.retry_s), 1))
        content = {"error": self.error, "detail": self.detail, "field": self.field}
        return JSONResponse(content, status_code=self.status, headers=headers)


def refusal_of(request: Request, error: Exception) -> ApiError:
    """Return the answer for an error that a route may raise on purpose; raises it where it is a defect."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case RequestValidationError():
            return _of_validation(error, request.headers.get("content-type", ""))
        case AccountError():
            return _of_accounts(error)
        case RegistryError():
            return _of_database(error)
        case CannotSteer():
            return ApiError(409, str(error))
        case _:
            raise error


EXPECTED: Final = (HTTPException, RequestValidationError, AccountError, RegistryError, CannotSteer)
"""Errors that `refusal_of` knows; defects are answered by the envelope."""


def route_of(scope: Any) -> str:
    """Return the path of a request's route as it is declared, never what the caller wrote; "" for none."""
    return str(getattr(scope.get("route"), "path", ""))


def field_of(place: Sequence[str | int]) -> str | None:
    """Return what an answer calls a field by; None for the body as a whole. place: the way to it."""
    return ".".join(map(str, place))[:MAX_FIELD] or None


def _of_accounts(error: AccountError) -> ApiError:
    match error:
        case BadInput():
            return ApiError(422, str(error), field=error.field)
        case Unauthenticated():
            return ApiError(401, str(error))
        case Forbidden():
            return ApiError(403, str(error))
        case NoSuchThing():
            return ApiError(404, str(error))
        case AccountConflict():
            return ApiError(409, str(error))
        case QuotaReached():
            return ApiError(409, str(error), error="quota")
        case TooManyAttempts():
            return ApiError(429, str(error), retry_s=error.wait_s)
        case _:
            raise error


def _of_database(error: RegistryError) -> ApiError:
    match error:
        case Conflict():
            return ApiError(409, "others changed the same thing at the same time: look at it and try again")
        case NotAllowed():
            return ApiError(409, str(error))
        case Busy():
            return ApiError(
                503, "a database is busy with other writes: nothing was changed; try again", retry_s=1
            )
        case Unavailable():
            log.warning("a database does not answer", extra={"error": str(error)})
            return ApiError(503, "a database does not answer now: try again", retry_s=5)
        case _:
            raise error


def _of_validation(error: RequestValidationError, content_type: str) -> ApiError:
    first = error.errors()[0]
    if tuple(first["loc"]) == ("body",) and first["type"] != "missing" and not _is_json(content_type):
        return ApiError(422, "the body is of another type than JSON: send `Content-Type: application/json`")
    field = field_of(first["loc"][1:])  # the first is body, query, path or header
    if first["type"] == "json_invalid":
        return ApiError(422, "the body is not JSON")
    return ApiError(422, f"{field or 'the body'}: {first['msg']}", field=field)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


# ---- Rates of one address and one account, and streams of an account; beyond them the answer is 429.

ADDRESS: Final = Rates(calls=200.0, bytes=32.0 * MIB, settings="per address")
ACCOUNT: Final = Rates(calls=100.0, bytes=16.0 * MIB, settings="per account")
STREAMS: Final = 512
"""Open event streams of an account: each takes one of the connections that all callers share."""


class CallLimits:
    """The limits of addresses and accounts; for one event loop."""

    def __init__(self, address: Rates = ADDRESS, account: Rates = ACCOUNT, *, streams: int = STREAMS) -> None:
        self._addresses = RateLimits(address)
        self._accounts = RateLimits(account)
        self._most_streams, self._streams = streams, Counter[str]()

    def admit_address(self, address: str) -> None:
        _take(self._addresses, address)

    def admit(self, subject: str) -> None:
        _take(self._accounts, subject)

    def begin_stream(self, subject: str) -> Callable[[], None]:
        """Count a stream of an account, and return what is called at its end; raises ApiError 429."""
        if self._streams[subject] >= self._most_streams:
            detail = (
                f"{self._most_streams} streams of this account are open: end one before you begin another"
            )
            raise ApiError(429, detail, retry_s=1)
        self._streams[subject] += 1
        return lambda: self._end_stream(subject)

    def _end_stream(self, subject: str) -> None:
        self._streams[subject] -= 1
        if not self._streams[subject]:
            del self._streams[subject]


def _take(limits: RateLimits, caller: str) -> None:
    """Raise ApiError 429 where the limits would delay the call: an HTTP client waits itself."""
    try:
        wait_s = limits.reserve(caller, 0)
    except Exceeded as error:
        raise ApiError(429, str(error), retry_s=1) from error
    if wait_s > 0:
        raise ApiError(429, "too many requests: wait a second and go on more slowly", retry_s=wait_s)


# ---- Numbers of requests: neither a bool nor a text of digits is accepted.


def number_alone(value: Any) -> Any:
    """Return a value that is neither text nor bool; raises PydanticCustomError for those."""
    if isinstance(value, bool | str | bytes):
        raise PydanticCustomError("no_number", "must be a number: neither true or false, nor in quotes")
    return value


NUMERIC: Final = BeforeValidator(number_alone)
"""For integers: accepts `7.0`, as written by tables with empty cells, but not 7.5."""
Number = Annotated[float, Field(strict=True)]


def storable(text: str) -> str:
    """Return a text that every database can store; raises ValueError for NUL and half a surrogate pair."""
    if "\0" in text:
        raise ValueError("must not contain the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode text, without half a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(storable)]
Line = Annotated[Text, Field(min_length=1, max_length=64)]
Secret = Annotated[SecretStr, Field(max_length=4096)]


class Body(BaseModel):
    """The body of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def example(**values: Any) -> ConfigDict:
    """Return the configuration of a body with an example for the document, which contract tests send."""
    return ConfigDict(json_schema_extra={"examples": [values]})


# ---- Answers: the framework checks each against the model that its route declares, and documents it so.


class Answer(BaseModel):
    """The body of an answer, which has no other field. It can be validated from a row of a table."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)
