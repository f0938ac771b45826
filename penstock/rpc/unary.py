"""One call of a service behind its parsing: what is no request, and what nobody foresaw, as statuses.

Bytes that are no request end as INVALID_ARGUMENT, an error that nobody foresaw as INTERNAL with a number that
stands in the log beside its cause: no text of an exception leaves the process.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from penstock.wire.outline import Unfit

log = logging.getLogger(__name__)

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


def unary(
    name: str,
    message: Any,
    body: Callable[[Any, Context], Awaitable[Any]],
    check: Callable[[bytes], None] = lambda _data: None,
    plain: Callable[[bytes, Context], Awaitable[Any]] | None = None,
) -> Callable[[bytes, Context], Awaitable[Any]]:
    """A handler of bytes; `check` raises Unfit for those that shall not even be parsed.

    plain: answers where it can without parsing, with None where it cannot.
    """
    parse = message.FromString

    async def call(data: bytes, context: Context) -> Any:
        request = None
        try:
            check(data)
            if plain is not None and (reply := await plain(data, context)) is not None:
                return reply
            request = parse(data)
            return await body(request, context)
        except Unfit as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error}")
        except DecodeError:
            text = f"{name}: {len(data)} bytes that are no {name}Request; check the protocol version"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        except grpc.aio.AbortError:
            raise
        except Exception:
            number = secrets.token_hex(4)
            words = {"request_id": number, "client_request_id": getattr(request, "request_id", "")}
            log.exception("%s failed", name, extra=words)
            await context.abort(grpc.StatusCode.INTERNAL, unforeseen(name, number))

    return call


def unforeseen(name: str, number: str) -> str:
    """What a caller is told of an error that nobody foresaw; its cause stands in the log alone."""
    return f"{name} failed; request id {number} in the server's log"
