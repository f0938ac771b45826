"""Names that cross a process border: one grammar for runs, policies and actors."""

import re
import secrets

MAX_ID_LENGTH = 64
_AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GRAMMAR = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


def check_id(field: str, value: str) -> str:
    """Return `value` when it is an id; raises ValueError that names the field, value and remedy."""
    if not _GRAMMAR.fullmatch(value):
        raise ValueError(
            f"{field}={value[:80]!r} is not an id: use 1 to {MAX_ID_LENGTH} of a-z, 0-9 and '-', "
            "with a letter or digit at both ends"
        )
    return value


def check_policy(field: str, value: str) -> str:
    """Return `value` when it names a policy: an id, or PROJECT/AGENT as the gateway has them.

    Raises ValueError that names the field, value and remedy.
    """
    project, slash, agent = value.partition("/")
    if not slash:
        return check_id(field, value)
    if len(value) > MAX_ID_LENGTH or not (_GRAMMAR.fullmatch(project) and _AGENT.fullmatch(agent)):
        raise ValueError(
            f"{field}={value[:80]!r} is neither an id nor PROJECT/AGENT: use at most {MAX_ID_LENGTH} "
            "characters, an id before the slash, and letters, digits, '.', '_' and '-' behind it"
        )
    return value


def to_id(text: str) -> str:
    """Return the nearest id to any text, such as "cartpole-v1" for "CartPole-v1"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-") or "x"


def new_run_name(workload: str) -> str:
    """Return a run's name: what it works on plus a random suffix, so that no run reuses another's."""
    return f"{to_id(workload)}-{secrets.token_hex(3)}"
