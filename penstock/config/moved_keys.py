"""Keys of the configuration that an earlier version had in another place.

A run's own `config.toml` may hold them: it is read as if it had the new ones. Anywhere else they are refused,
and the message names the new key.
"""

from collections.abc import Mapping
from typing import Any, Final

MOVED: Final[Mapping[str, str]] = {
    "serving.registry": "registry.url",
    "serving.registry_password_file": "registry.password_file",
    "serving.activate_first": "registry.activate_first",
    "serving.refresh_s": "registry.refresh_s",
    "serving.canary_horizon": "canary.horizon",
    "serving.canary_false_alarm": "canary.false_alarm",
    "serving.canary_slow_ms": "canary.slow_ms",
    "serving.canary_return_range": "canary.return_range",
    "algorithm.stale_epochs": "algorithm.lagging_epochs",
}
"""Old key → new key, both as section.key."""


def with_new_keys(content: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same configuration under the keys of today, and the old keys that it held.

    content: nested as TOML is read; it stays as it is. Where it holds both keys the new one counts.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in content.items()}
    found = []
    for old, new in MOVED.items():
        section, _, key = old.partition(".")
        if isinstance(result.get(section), dict) and key in result[section]:
            value = result[section].pop(key)
            new_section, _, new_key = new.partition(".")
            result.setdefault(new_section, {}).setdefault(new_key, value)
            found.append(old)
    return result, tuple(found)
