"""Penstock: an asynchronous actor-learner reinforcement-learning system.

`from penstock import PolicyClient` works, and loads `penstock.client` only then.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client import (
        AsyncPolicyClient,
        Credentials,
        ExternalEnvironment,
        PolicyClient,
        PolicyError,
    )

__version__ = "0.1.0"
__all__ = ["AsyncPolicyClient", "Credentials", "ExternalEnvironment", "PolicyClient", "PolicyError"]


def __getattr__(name: str) -> object:
    """One of `__all__`, from `penstock.client`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock import client  # noqa: PLC0415 - loaded when it is asked for

    return getattr(client, name)
