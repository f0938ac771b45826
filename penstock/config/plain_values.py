"""What a value of the configuration may be, whatever its key: looked at before any section is asked.

A value is written to the run's `config.toml`, told to actors as JSON and shown in messages. So it is text, a
finite number, true or false, or lists and tables of these; and a URL holds no secret, because a
reader of one of those would read it too.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.url_secrets import remedy, secret_in, without_secret

_SHOWN: Final = 80
_MOST: Final = 2**63 - 1


def check_values(layer: Mapping[str, Any]) -> None:
    """Raise ConfigurationError that names the first value which is none; a secret is not repeated.

    layer: nested settings, as they were read.
    """
    for key, value in _leaves("", layer):
        if isinstance(value, str):
            _check_text(key, value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{key}={value}: no finite number; write one")
        elif isinstance(value, int) and abs(value) > _MOST:
            raise ConfigurationError(f"{key}={value}: TOML has no number beyond 64 bits; write a smaller one")
        elif hasattr(value, "isoformat"):
            raise ConfigurationError(f"{key}={value}: a date is no setting; write it in quotes, as text")


def _check_text(key: str, text: str) -> None:
    where = secret_in(text)
    if where is not None:
        raise ConfigurationError(
            f"{key}={without_secret(text)}: holds a secret in {where}, which files and messages would show; "
            f"{remedy(text)}"
        )
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigurationError(f"{key}={text[:_SHOWN]!r}: holds what is no text; write it in UTF-8")


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with its key, and every name of a table as a value of the table."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield key or str(name), name
            yield from _leaves(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(key, inner)
    else:
        yield key, value
