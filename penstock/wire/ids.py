"""Names that cross a process border: one grammar for runs, policies and actors."""

import re
import secrets

MAX_ID_LENGTH = 64
_GRAMMAR = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


def check_id(field: str, value: str) -> str:
    """Return `value` when it is an id; raises ValueError that names the field, value and remedy."""
    if not _GRAMMAR.fullmatch(value):
        raise ValueError(
            f"{field}={value[:80]!r} is not an id: use 1 to {MAX_ID_LENGTH} of a-z, 0-9 and '-', "
            "with a letter or digit at both ends"
        )
    return value


def to_id(text: str) -> str:
    """Return the nearest id to any text, such as "cartpole-v1" for "CartPole-v1"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-") or "x"


def new_run_name(workload: str) -> str:
    """Return a run's name: what it works on plus a random suffix, so that no run reuses another's."""
    return f"{to_id(workload)}-{secrets.token_hex(3)}"
