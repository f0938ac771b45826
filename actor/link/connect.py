"""How a process of the actor opens its link to the broker."""

from collections.abc import Callable

from penstock.actor.link.broker_client import BrokerClient
from penstock.config.credentials import credentials
from penstock.config.settings import ConfigurationError, Settings


def connect(broker: str, settings: Settings, on_answer: Callable[[], None] = lambda: None) -> BrokerClient:
    """Return a client of the broker at that address; `on_answer` is called after every answer.

    Raises ConfigurationError for an address or files that cannot be used.
    """
    try:
        return BrokerClient(broker, credentials(settings.security), on_answer)
    except ValueError as error:
        raise ConfigurationError(f"--broker: {error}") from error
