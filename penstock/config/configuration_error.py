"""The error for an unusable configuration, and how to install an absent package."""

from typing import Final

DISTRIBUTION: Final = "penstock-rl"
"""Name of the distribution; a package `penstock` of an index is another program."""


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message names key, value and remedy."""


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra: in a checkout, and by the distribution's name."""
    return f"`pip install '.[{extra}]'` in a checkout, or `pip install '{DISTRIBUTION}[{extra}]'`"
