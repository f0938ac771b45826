"""Secrets on a command line, which everybody on the machine can read: refused before anything else."""

import re
from collections.abc import Sequence
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.url_secrets import REDIS_REMEDY, remedy, secret_in, without_secret

_KEY: Final = "security.redis_password="
_ASSIGNED: Final = re.compile(r"(--set=|--[\w-]+=)?([\w.-]+=)?(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigurationError that names URL or key, not the secret, and where the secret belongs."""
    for word in words:
        if word.removeprefix("--set=").startswith(_KEY):
            raise ConfigurationError(
                f"--set {_KEY}…: everybody on this machine can read a command line; {REDIS_REMEDY}"
            )
        head = _ASSIGNED.match(word)
        url = word[head.end() :] if head else word
        where = secret_in(url)
        if where is not None:
            named = f"{word[: len(word) - len(url)]}{without_secret(url)}"
            raise ConfigurationError(
                f"{named}: holds a secret in {where}, and everybody on this machine can read a command line; "
                f"{remedy(url)}"
            )
