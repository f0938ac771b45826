"""Settings as TOML text: the run's `config.toml`, from which every service starts.

Unset values are left out (the reader's default is the same). Secrets are never written.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from penstock.config.settings import Section, Settings


def dump(settings: Settings) -> str:
    """All settings but the unset and the secret; `settings.load([parse_toml(...)])` reads them back."""
    plain = _plain(settings)
    top = [f"{key} = {_value(value)}" for key, value in plain.items() if not isinstance(value, Mapping)]
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in section.items())])
        for name, section in plain.items()
        if isinstance(section, Mapping) and section
    ]
    return "\n\n".join(["\n".join(top), *blocks]) + "\n"


def masked(settings: Settings) -> str:
    """`dump` with secrets shown as stars, for `--print-config`."""
    text = dump(settings)
    if settings.security.redis_password is None:
        return text
    return text.replace("[security]\n", '[security]\nredis_password = "**********"\n')


def _plain(section: Section) -> dict[str, Any]:
    found = {name: getattr(section, name) for name in type(section).model_fields}
    return {
        name: _plain_value(value)
        for name, value in found.items()
        if value is not None and not isinstance(value, SecretStr)
    }


def _plain_value(value: object) -> object:
    if isinstance(value, Section):
        return _plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, tuple) else value


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    return repr(value)
