"""Build the gate of a server from its configuration: proof, run, accepted tokens, rate limits."""

from penstock.config.settings import ConfigurationError, Settings
from penstock.rpc.auth import Credentials, Proof
from penstock.rpc.bearer_tokens import AcceptedTokens
from penstock.rpc.gate import Gate
from penstock.rpc.rate_limits import Budgets, Rates
from penstock.runtime import metrics


def build_gate(
    settings: Settings, credentials: Credentials, address: str, rates: Rates | None = None
) -> Gate:
    """Return the gate of a server.

    Args:
        settings: of the process.
        credentials: with which the server proves itself and checks its callers.
        address: at which it listens.
        rates: rate limits; None: those of a broker.

    Raises:
        ConfigurationError: the server could not tell which callers it may serve.
    """
    proof = credentials.proof(address)
    if proof is not Proof.NOTHING and not settings.run:
        raise ConfigurationError(
            "run='': certificates and tokens are a run's; say whose are served: --set run=NAME"
        )
    return Gate(
        proof=proof,
        run=settings.run,
        tokens=_tokens(credentials) if proof is Proof.TOKEN else None,
        budgets=Budgets(
            rates or Rates(calls=settings.broker.max_calls_per_s, bytes=settings.broker.max_bytes_per_s)
        ),
        on_denied=lambda label: metrics.REFUSALS.labels(reason=label).inc(),
    )


def _tokens(credentials: Credentials) -> AcceptedTokens | None:
    file = credentials.accepted_tokens
    try:
        return None if file is None else AcceptedTokens(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"security.accepted_tokens: {error}") from error
