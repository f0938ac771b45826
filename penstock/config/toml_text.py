"""Settings as TOML text: the run's `config.toml`, from which every service starts.

Unset values are left out (the reader's default is the same). Secrets are never written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import SecretStr

from penstock.config.settings import Section, Settings


def dump(settings: Settings) -> str:
    """Return all settings but the unset and the secret; `load([parse_toml(...)])` reads them back."""
    return _text(_plain(settings))


def shown(settings: Settings, *, advanced: bool) -> str:
    """Return the settings for `--print-config`, as TOML; secrets are stars."""
    content = _plain(settings)
    if settings.security.redis_password is not None:
        content["security"]["redis_password"] = "**********"  # noqa: S105 - stars
    if advanced:
        return _text(content)
    hidden = _hide_advanced(settings, content)
    note = f"# {hidden} advanced settings stand at their defaults; --advanced shows them."
    return f"{_text(content)}\n{note}\n"


def _text(content: Mapping[str, Any]) -> str:
    """As TOML. The one control character that the writer leaves as it is, DEL, TOML forbids."""
    return tomli_w.dumps(content).replace("\x7f", "\\u007F")


def _hide_advanced(section: Section, content: dict[str, Any]) -> int:
    """Take the advanced settings at their defaults out of `content`; returns how many there are."""
    hidden = 0
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            hidden += _hide_advanced(value, content[name])
        elif section.is_advanced(name) and value == field.default:
            content.pop(name, None)
            hidden += 1
    return hidden


def _plain(section: Section) -> dict[str, Any]:
    found = {name: getattr(section, name) for name in type(section).model_fields}
    return {
        name: _plain_value(value)
        for name, value in found.items()
        if value is not None and not isinstance(value, SecretStr)
    }


def _plain_value(value: object) -> object:
    match value:
        case Section():
            return _plain(value)
        case list() | tuple():
            return [_plain_value(item) for item in value]
        case Mapping():
            return {key: _plain_value(item) for key, item in value.items()}
        case Path():
            return str(value)
        case _:
            return value
