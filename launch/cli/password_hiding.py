"""Takes a password off the command line, which everybody on the machine can read (`ps`).

A password in `--redis URL` or `--set security.redis_password=…` moves into the environment, which only the
same user can read, and the process begins again without it: same pid, same files. Better still, nobody
types it: `security.redis_password_file` or the variable itself.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from penstock.config.redis_url import split_password

VARIABLE: Final = "PENSTOCK_SECURITY__REDIS_PASSWORD"
_KEY: Final = "security.redis_password="
_URL_KEY: Final = "broker.redis="


def hide_password() -> None:
    """Begin again without the password, if there is one on the command line."""
    words, password = without_password(sys.orig_argv)
    if password is not None:
        environment = {**os.environ, VARIABLE: json.dumps(password, ensure_ascii=False)}
        os.execve(sys.executable, words, environment)  # noqa: S606 - ourselves


def without_password(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The command line without its password, and the password; one in a URL goes before an assigned one."""
    kept: list[str] = []
    assigned = in_url = None
    for word in words:
        option, is_joined, value = word.partition("=") if word.startswith("--") else ("", "", word)
        shown, secret = _split(value)
        if value.startswith(_KEY):
            assigned = secret
            if not is_joined and kept and kept[-1] == "--set":
                kept.pop()
            continue
        in_url = in_url if secret is None else secret
        kept.append(f"{option}{is_joined}{shown}" if secret is not None else word)
    return kept, assigned if in_url is None else in_url


def _split(value: str) -> tuple[str, str | None]:
    """A value without its password, and the password."""
    if value.startswith(_KEY):
        text = value.removeprefix(_KEY)
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return "", text[1:-1] if quoted else text
    prefix = _URL_KEY if value.startswith(_URL_KEY) else ""
    url = value.removeprefix(prefix)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        return value, None
    shown, password = split_password(url)
    return prefix + shown, password
