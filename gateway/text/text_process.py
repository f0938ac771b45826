"""Process body of `penstock gateway text`: the API of agents on loopback, without accounts."""

import logging
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Response

from gateway.frame.api_errors import ApiError
from gateway.frame.call_limits import CallLimits
from gateway.frame.envelope import Doors, Envelope
from gateway.http_server import HttpServer
from gateway.text.chat_errors import INVALID, ChatError
from gateway.text.chat_routes import make_app
from penstock.client import AsyncTextClient
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.rpc.auth import Credentials, check_address, is_local
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ROLE = "gateway"
REACH_S: Final = 2.0
"""Seconds for which a server of text that cannot be reached is tried again."""


def main(lifecycle: Lifecycle, settings: Settings, *, server: str, listen: str) -> int:
    """Serve until the lifecycle drains; returns the exit code.

    server: address of the server of text. Raises ConfigurationError for an address that cannot be used, and
    for one of its own that lies beyond loopback.
    """
    if not is_local(listen):
        raise ConfigurationError(
            f"--listen {listen}: without accounts it answers this machine alone: say 127.0.0.1:PORT"
        )
    own = credentials(settings.security)
    try:
        own.for_channel(check_address(server))
    except ValueError as error:
        raise ConfigurationError(f"--server: {error}") from error
    health = Health(ROLE)
    _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
    http = HttpServer(guarded_app(server, own), listen)
    http.start(on_end=lambda: lifecycle.drain("the HTTP server has ended"))
    health.set_ready(True)
    announce(ROLE, metrics_port=metrics_port, address=http.address)
    log.info("serving", extra={"url": http.url, "server": server})
    lifecycle.draining.wait()
    health.set_ready(False, "draining")
    http.stop()
    return EXIT_FAILED if http.failed else EXIT_OK


def guarded_app(server: str, own: Credentials, limits: CallLimits | None = None) -> FastAPI:
    """Return the application over the server of text at an address, with what surrounds every request.

    limits: of an address; None: those of every gateway.
    """

    def make_client() -> AsyncTextClient:
        return AsyncTextClient(server, credentials=own, policy="", reach_s=REACH_S)

    app = make_app(make_client)
    app.add_middleware(Envelope, doors=Doors(), admit=(limits or CallLimits()).admit_address, form=in_form)
    return app


def in_form(error: ApiError) -> Response:
    """Return what is refused before the API hears of it, as that API's errors are."""
    kind = "rate_limit_error" if error.status == HTTPStatus.TOO_MANY_REQUESTS else INVALID
    param = "messages" if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    return ChatError(
        error.status, str(error.detail), param=param, code=error.error, kind=kind, retry_s=error.retry_s
    ).response()
