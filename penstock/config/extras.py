"""How this distribution and its extras are installed: what a remedy says where a package is absent."""

from typing import Final

DISTRIBUTION: Final = "penstock-rl"
"""Name of the distribution; a package `penstock` of an index is another program."""


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra: in a checkout, and by the distribution's name."""
    return f"`pip install '.[{extra}]'` in a checkout, or `pip install '{DISTRIBUTION}[{extra}]'`"
