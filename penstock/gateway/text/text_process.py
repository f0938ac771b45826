"""Process body of `penstock gateway text`: the API of agents on loopback, without accounts."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Response

from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.call_limits import CallLimits
from penstock.gateway.frame.doors import Doors
from penstock.gateway.frame.envelope import Envelope
from penstock.gateway.http_server import HttpServer
from penstock.gateway.sites.served_text import ServedText
from penstock.gateway.sites.site import Upstream
from penstock.gateway.sites.site_process import RunBehind
from penstock.gateway.text.agents import Agents, option_of
from penstock.gateway.text.chat_errors import INVALID, ChatError
from penstock.gateway.text.chat_routes import make_app
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ROLE: Final = "gateway"


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    agents: Mapping[str, AbstractContextManager[RunBehind]],
    listen: str,
) -> int:
    """Serve until the lifecycle drains; returns the exit code.

    agents: at least one run with a server of text, by name; that of FIRST is known by its policy's. Raises
    ConfigurationError for an address that cannot be used, and for one of its own that lies beyond loopback.
    """
    if not is_local(listen):
        raise ConfigurationError(
            f"--listen {listen}: without accounts it answers this machine alone: say 127.0.0.1:PORT"
        )
    own = credentials(settings.security)
    health = Health(ROLE)
    with ExitStack() as stack:
        runs = {name: stack.enter_context(one) for name, one in agents.items()}
        for name, run in runs.items():
            _check_reach(name, run.addresses().server, own)
        _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
        upstreams = {name: Upstream(addresses=run.addresses, credentials=own) for name, run in runs.items()}
        http = HttpServer(guarded_app(upstreams), listen)
        http.start(on_end=lambda: lifecycle.drain("the HTTP server has ended"))
        health.set_ready(True)
        announce(ROLE, metrics_port=metrics_port, address=http.address)
        log.info("serving", extra={"url": http.url, "agents": list(runs)})
        lifecycle.draining.wait()
        health.set_ready(False, "draining")
        http.stop()
    return EXIT_FAILED if http.failed else EXIT_OK


def _check_reach(name: str, address: str, own: Credentials) -> None:
    """Raise ConfigurationError for an address to which nothing may be sent in plaintext."""
    try:
        if address:
            own.for_channel(address)
    except ValueError as error:
        raise ConfigurationError(f"{option_of(name)}: {error}") from error


def guarded_app(upstreams: Mapping[str, Upstream], limits: CallLimits | None = None) -> FastAPI:
    """Return the application over these runs by name, with what surrounds every request.

    limits: of an address; None: those of every gateway.
    """
    app = make_app(Agents({name: ServedText(one) for name, one in upstreams.items()}))
    app.add_middleware(Envelope, doors=Doors(), admit=(limits or CallLimits()).admit_address, form=in_form)
    return app


def in_form(error: ApiError) -> Response:
    """Return what is refused before the API hears of it, as that API's errors are."""
    kind = "rate_limit_error" if error.status == HTTPStatus.TOO_MANY_REQUESTS else INVALID
    kind = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind
    param = "messages" if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    return ChatError(
        error.status, str(error.detail), param=param, code=error.error, kind=kind, retry_s=error.retry_s
    ).response()
