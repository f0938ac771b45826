"""The gRPC server of a process, from its address to the end of its last call.

    ServerFrame ─► services are added ─► bind ─► begin ─► … ─► drain ─► close
                                                 SERVING      NOT_SERVING, calls in flight end

Broker, policy server and reward service use it. Before a call reaches its handler it passes the gate (who
calls, may they, not too much) and the boundary (size, parsing, errors).
"""

import asyncio
from collections.abc import Callable, Sequence

import grpc

from penstock.config.credentials import credentials
from penstock.config.settings import ConfigurationError, Settings
from penstock.rpc.auth import NO_CALLS, AcceptedTokens, Calls, Credentials, Proof
from penstock.rpc.boundary import Boundary
from penstock.rpc.gate import Gate, RateLimits, Rates
from penstock.rpc.server import STREAMS_PER_CONNECTION, bind, build_server
from penstock.runtime import metrics
from penstock.runtime.health import announce


class ServerFrame:
    """Runs the gRPC server of a process, see the module. One event loop uses it."""

    def __init__(
        self,
        role: str,
        services: Sequence[str],
        settings: Settings,
        listen: str,
        *,
        boundary: Boundary,
        rates: Rates | None = None,
        streams_per_connection: int = STREAMS_PER_CONNECTION,
        calls: Calls = NO_CALLS,
    ) -> None:
        """Make a server that has no services and no address yet.

        role: as the process is announced. services: their full names, for health and reflection.
        listen: HOST:PORT (0: a free port) or unix:/path. rates: of each caller; None: those of a broker.
        calls: which party may call what of the services that the core does not have.
        Raises ConfigurationError for credentials that cannot be used, and for a server that could not tell
        whose callers it may serve.
        """
        section = settings.broker
        self._role, self._listen = role, listen
        self._credentials = credentials(settings.security)
        self._address = ""
        self._front = build_server(
            services,
            interceptors=[_gate(settings, self._credentials, listen, rates, calls), boundary],
            maximum_concurrent_rpcs=section.max_concurrent_calls,
            max_connections=section.max_connections,
            max_connection_age_s=section.max_connection_age_s,
            streams_per_connection=streams_per_connection,
        )

    @property
    def server(self) -> grpc.aio.Server:
        return self._front.server

    def bind(self) -> str:
        """Take the address and return it as clients use it."""
        try:
            self._address = bind(self.server, self._listen, self._credentials)
        except (ValueError, OSError) as error:
            raise ConfigurationError(str(error)) from error
        return self._address

    async def begin(self, *, metrics_port: int) -> None:
        """Serve calls, answer health checks with SERVING and announce the process."""
        await self.server.start()
        await self._front.set_serving(serving=True)
        announce(self._role, metrics_port=metrics_port, address=self._address)

    async def drain(self, grace_s: float, release: Callable[[], None] = lambda: None) -> None:
        """Say NOT_SERVING, refuse new calls, end held ones by `release`, give the others `grace_s`."""
        await self._front.set_serving(serving=False)
        release()
        await self.server.stop(grace_s)

    async def close(self) -> None:
        await self.server.stop(0)


def setter(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets `event` of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def set_event() -> None:
        loop.call_soon_threadsafe(event.set)

    return set_event


def _gate(settings: Settings, own: Credentials, address: str, rates: Rates | None, calls: Calls) -> Gate:
    proof = own.proof(address)
    if proof is not Proof.NOTHING and not settings.run:
        raise ConfigurationError(
            "run='': certificates and tokens are a run's; say whose are served: --set run=NAME"
        )
    return Gate(
        proof=proof,
        run=settings.run,
        tokens=_tokens(own) if proof is Proof.TOKEN else None,
        limits=RateLimits(
            rates or Rates(calls=settings.broker.max_calls_per_s, bytes=settings.broker.max_bytes_per_s)
        ),
        on_denied=lambda label: metrics.REFUSALS.labels(reason=label).inc(),
        calls=calls,
    )


def _tokens(own: Credentials) -> AcceptedTokens | None:
    file = own.accepted_tokens
    try:
        return None if file is None else AcceptedTokens(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"security.accepted_tokens: {error}") from error
