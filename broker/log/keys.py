"""Every key of a run in Redis, which holds one run: the names are constant.

`script.load` puts them into every Lua script, under the same names.
"""

from typing import Final

STATE: Final = "penstock:state"
"""Hash: run, lease, counters of the log, pointer of the weights, pacing, desired state."""
SPECIFICATION: Final = "penstock:specification"
"""Encoded RunSpecification."""
SESSION: Final = "penstock:session:"
"""Prefix, hash per open session.

Actor, role, sequence, begin_through, min_version, round, reports, applied, fetches, rewound, returned,
lenient_through, owner; of its credit: taken, since, pace, tag (`scripts/_credit.lua`).
"""
OPEN: Final = "penstock:open"
"""Sorted set of open sessions by the time of their last call, in milliseconds of Redis time."""
ACTORS: Final = "penstock:actors"
"""Hash: actor id → its open session."""
SUPERSEDED: Final = "penstock:superseded"
"""Sorted set of the newest sessions that a newer session of the same actor closed, by number."""
CONVICTED: Final = "penstock:convicted"
"""Hash: session that the learner closed because of its experience → why. Bounded: it begins anew."""
DAMAGED: Final = "penstock:damaged"
"""Hash: actor id → such sessions of it in a row. Begins anew with each learner."""
ROLLOUTS: Final = "penstock:rollouts"
"""Set of open rollout sessions."""
CREDIT: Final = "penstock:leave"
"""Hash: rollout session → sequences that it has credit for and has not appended."""
DUE: Final = "penstock:due"
"""Sorted set of rollout sessions with credit by when it may be taken back, in milliseconds of Redis time."""
WAITING: Final = "penstock:waiting"
"""Sorted set of rollout sessions that wait for credit, by the milliseconds of credit that they have used."""
ROSTER: Final = "penstock:roster"
"""Lock-step: set of sessions that owe a fragment to the round that is open."""
LOG: Final = "penstock:log"
"""Stream `n-0`: h header, t running total of steps, z payload size, r lock-step round."""
PAYLOAD: Final = "penstock:payload:"
"""Prefix: payload of entry n."""
STAGING: Final = "penstock:staging:"
"""Prefix: payload of an attempt; expires."""
SHADOW: Final = "penstock:shadow"
"""Stream of shadow fragments, bounded, counted nowhere."""
SHADOW_PAYLOAD: Final = "penstock:shadow:"
"""Prefix: payload of shadow entry n."""
REPORTS: Final = "penstock:reports"
"""Stream `n-0`: a actor id, b encoded report. Bounded: the oldest are removed."""
PROBES: Final = "penstock:probes"
"""Hash: session → its newest answer to the probe, as JSON."""
COMMITS: Final = "penstock:commits"
"""List of the newest committed checkpoints, oldest first, as JSON."""
PUBLICATIONS: Final = "penstock:publications"
"""Hash: version whose bytes are kept → "update sha256 size chunks"."""
STAGED_WEIGHTS: Final = "penstock:staged-weights"
"""Hash: version allocated and not yet published → chunks."""
WEIGHTS: Final = "penstock:weights:"
"""Prefix, `version:index`: one chunk of weight bytes."""
PINS: Final = "penstock:pins"
"""Set of versions whose bytes stay while they are evaluated."""
FETCHES: Final = "penstock:fetches"
"""Hash: version of more than a chunk whose bytes stay while it is fetched → sessions that fetch it."""
KEPT: Final = "penstock:kept"
"""Set of versions whose bytes stay because the registry keeps them."""
LOST: Final = "penstock:lost"
"""List, for audits: what a Redis that went back in time has lost, by session; see `_run.lua`.

Bounded: the oldest are removed.
"""
COMMAND: Final = "penstock:command:"
"""Prefix, hash per command of an operator that the learner answers.

Id, action, argument, reason, through, answer. Bounded: the oldest are removed.
"""
COMMAND_IDS: Final = "penstock:command-ids"
"""Hash: request id → number of its command."""
LEARNER: Final = "penstock:learner"
"""The latest status that the learner reported, as JSON."""
CHANGED: Final = "penstock:changed"
"""Channel: a change was made that may end a wait.

"": of any. "12 15": of these sessions. "+ 12 15": of these and of all that do not wait for credit.
"""
ABSENT: Final = "penstock:absent"
"""A key that never exists.

Deleting it first lifts the refusal of writes at `maxmemory` for the rest of a script.
"""


def payload(number: int) -> str:
    return f"{PAYLOAD}{number}"


def weights(version: int, index: int) -> str:
    return f"{WEIGHTS}{version}:{index}"


def entry_id(number: int) -> str:
    return f"{number}-0"
