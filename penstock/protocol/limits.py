"""The bounds of all messages between processes, and the deadline of every call, in one place."""

import re
import secrets
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_MESSAGE_BYTES: Final = 8 * MIB
"""Largest gRPC message either way; an Append with its largest fragment fits below it."""
MESSAGE_OVERHEAD_BYTES: Final = 64 * KIB
"""Room left in a message for headers and framing beside the payloads."""
SLOT_BYTES: Final = 32
"""Most bytes of one slot in a fragment's header."""
SPAN_BYTES: Final = 48
"""Most bytes of one weight span in a fragment's header."""
ENTRY_BYTES: Final = 512
"""Most bytes of one row of the tensor table in a fragment's header."""
HEADER_BYTES: Final = 4 * KIB
"""Most bytes of a fragment's header beside its slots, spans and table."""
WEIGHT_CHUNK_BYTES: Final = MIB
"""Most bytes of weights in one message or one Redis value."""
MAX_WEIGHT_BYTES: Final = 64 * 1024 * MIB
MAX_TENSORS: Final = 64
MAX_RANK: Final = 8
MAX_STEPS: Final = 4096
"""Largest T of a fragment."""
MAX_SLOTS: Final = 4096
"""Largest N of a fragment."""
MAX_ROWS_PER_APPEND: Final = 2**17
"""Most slots, spans and tensors that the headers of one Append list together."""
MAX_NUMBER: Final = 2**53
"""Largest number of anything that is counted: Redis scripts count in doubles."""
MAX_NAME_LENGTH: Final = 128
MAX_ATTRIBUTES_BYTES: Final = KIB
MAX_FRAGMENTS_PER_APPEND: Final = 256
MAX_EPISODES_PER_REPORT: Final = 4096
MAX_FIELDS: Final = 1024
"""Fields, which take time to walk, of an Append or a fragment; of a header more by its rows."""
MAX_ROW_BYTES: Final = KIB
"""Most bytes of a row in a header whose rows are counted before it is parsed."""
MAX_UNCOUNTED_BYTES: Final = 2 * KIB
"""Largest header whose rows are not counted before it is parsed."""
MAX_PROBE_ANSWERS: Final = 64
MAX_WATCH_WAIT_MS: Final = 30_000

APPEND_DEADLINE_S: Final = 10.0
CALL_DEADLINE_S: Final = 5.0
"""Deadline of every call that neither appends nor waits."""
WATCH_GRACE_S: Final = 5.0
"""What the deadline of a WatchLatest adds to the wait that it requests."""
LEAST_BYTES_PER_S: Final = 64 * KIB
"""The slowest supported connection: deadlines are longer by the time that a call's bytes need on it."""
SERVER_CALLS_S: Final = 5.0
"""Longest wait of a policy server that ends for its open calls.

A call takes milliseconds; what is still open after this long is a stream whose client does not close it.
"""
SERVER_FLUSH_S: Final = 10.0
"""Longest wait of a policy server that ends for the acknowledgement of what was learned."""
SERVER_GONE_S: Final = SERVER_CALLS_S + SERVER_FLUSH_S + 1.0
"""Longest time from the request to end until it has ended, with a second for work without a bound."""
STAGING_EXPIRY_S: Final = 60
"""Redis forgets a payload that was staged but never appended after this long."""


# ---- Names that cross a process border: one grammar for runs, policies and actors.

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
    """Return `value` when it names a policy: an id, or PROJECT/AGENT as the gateway has them."""
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
