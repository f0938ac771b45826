"""What the run behind a site refuses, or does not answer, as answers of the site."""

from collections.abc import Awaitable
from typing import TypeVar

from penstock.client import (
    DeadlinePassed,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    Unreachable,
)
from penstock.gateway.frame.api_errors import ApiError

T = TypeVar("T")


async def answered(call: Awaitable[T]) -> T:
    """Return the result of a call of the run; raises ApiError for what it refuses and where it is silent."""
    try:
        return await call
    except ValueError as error:
        raise ApiError(422, str(error)) from error
    except PolicyError as error:
        raise of_run(error) from error


def of_run(error: PolicyError) -> ApiError:
    """Return what a client of the run raised, as an answer."""
    detail = str(error) if error.refusal is None else error.refusal.detail
    match error:
        case InvalidRequest():
            return ApiError(422, detail)
        case Overloaded():
            return ApiError(429, detail, retry_s=1)
        case NotAllowed():
            return ApiError(502, f"the run does not know this gateway: {detail}", error="bad_gateway")
        case DeadlinePassed():
            return ApiError(504, detail, error="timeout", retry_s=1)
        case NotReady() | Unreachable():
            return not_yet(detail)
        case _:
            return ApiError(502, detail, error="bad_gateway")


def not_yet(why: str) -> ApiError:
    """Return the answer of a site whose run is not ready. why: what is missing."""
    return ApiError(503, f"the run behind it is not ready: {why}; try again", retry_s=1)
