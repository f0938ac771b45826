"""A Redis URL without its secret, so that configuration files, command lines and messages can show it.

The password stands behind the user (`redis://user:PASSWORD@host`) or in the query (`?password=`); where both
are given the first is the one that counts.
"""

from urllib.parse import parse_qsl, unquote, urlencode, urlsplit


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password, None when it holds none.

    A text that is no URL is taken apart all the same, for messages show it.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return _split_broken(url)  # the caller's message says what is wrong with it
    user_info, at, place = parts.netloc.rpartition("@")
    user, colon, password = user_info.partition(":")
    query = parse_qsl(parts.query, keep_blank_values=True)
    said = [value for key, value in query if key == "password"]
    if not colon and not said:
        return url, None
    kept = urlencode([(key, value) for key, value in query if key != "password"], safe="/")
    clean = parts._replace(
        netloc=f"{user}{at}{place}" if user else place, query=kept if said else parts.query
    )
    text = clean.geturl()
    if parts.scheme == "unix" and not clean.netloc and not text.startswith("unix://"):
        text = text.replace("unix:", "unix://", 1)
    return text, (unquote(password) or None) if colon else said[0]


def _split_broken(url: str) -> tuple[str, str | None]:
    """The same of a URL that cannot be taken apart: messages show it."""
    scheme, slashes, rest = url.partition("://")
    user_info, at, place = rest.rpartition("@")
    user, colon, password = user_info.partition(":")
    return f"{scheme}{slashes}{user}{at}{place}", password if colon else None
