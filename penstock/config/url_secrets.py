"""Secrets in URLs, which are refused in settings: settings are written to files, sent and shown."""

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

_SECRET_NAME: Final = re.compile(
    r"(password|passwd|passphrase|secret|token|credentials?|signature|bearer|jwt)$"
    r"|(api|access|account|auth|master|private|secret|shared|signing|subscription)key$"
    r"|(^|[-_.])(pwd|pass|key|auth|authorization|sig)$",
    re.IGNORECASE,
)
_WITH_USERS: Final = ("redis", "rediss", "unix", "postgres", "postgresql")
"""Schemes whose URLs may name a user, which is not a secret without a password."""
REDIS_REMEDY: Final = "put it into a file, security.redis_password_file=FILE"
_DATABASE_REMEDY: Final = "put it into a file, registry.password_file=FILE or a passfile of libpq"
_REMEDIES: Final = {
    "redis": REDIS_REMEDY,
    "rediss": REDIS_REMEDY,
    "unix": REDIS_REMEDY,
    "postgres": _DATABASE_REMEDY,
    "postgresql": _DATABASE_REMEDY,
    "sqlite": "SQLite asks for none, so leave it out: who may read the file is decided by its mode",
}
_HEADERS_REMEDY: Final = (
    "put it into a header: security.http_headers_file=FILE holds those of calls for rewards"
)


def secret_in(text: str) -> str | None:
    """Return where a URL holds a secret; None where it holds none, or the text is no URL."""
    if "://" not in text:
        return None
    try:
        parts = urlsplit(text)
    except ValueError:  # such as an unclosed bracket: the user of the URL reports it
        return "its user-info" if "@" in text else None
    user_info = parts.netloc.rpartition("@")[0]
    if user_info and (":" in user_info.rstrip(":") or _scheme(text) not in _WITH_USERS):
        return "its user-info"
    for part, arguments in (("query", parts.query), ("fragment", parts.fragment)):
        for name, value in parse_qsl(arguments.replace(";", "&")):
            if value and _SECRET_NAME.search(name):
                return f"{name!r} of its {part}"
    return None


def without_secret(text: str) -> str:
    """Return the part of such a URL that messages may show: scheme and host."""
    scheme, _, rest = text.partition("://")
    host = re.split(r"[/?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    return f"{scheme}://…{host}"


def remedy(text: str) -> str:
    return _REMEDIES.get(_scheme(text), _HEADERS_REMEDY)


def _scheme(text: str) -> str:
    return text.partition("://")[0].partition("+")[0].lower()


# ---- A Redis URL without its secret, so that configuration files, command lines and messages can show it.


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password, None when it holds none."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the caller reports the malformed URL
        scheme, slashes, rest = url.partition("://")
        user_info, at, place = rest.rpartition("@")
        user, colon, password = user_info.partition(":")
        return f"{scheme}{slashes}{user}{at}{place}", password if colon else None
    user_info, at, place = parts.netloc.rpartition("@")
    user, colon, password = user_info.partition(":")
    query = parse_qsl(parts.query, keep_blank_values=True)
    passwords = [value for key, value in query if key == "password"]
    if not colon and not passwords:
        return url, None
    kept = urlencode([(key, value) for key, value in query if key != "password"], safe="/")
    clean = parts._replace(
        netloc=f"{user}{at}{place}" if user else place, query=kept if passwords else parts.query
    )
    text = clean.geturl()
    if parts.scheme == "unix" and not clean.netloc and not text.startswith("unix://"):
        text = text.replace("unix:", "unix://", 1)
    return text, (unquote(password) or None) if colon else passwords[0]
