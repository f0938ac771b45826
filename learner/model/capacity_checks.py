"""Checks whether a run fits.

Its fragments, specification, log and weights must fit into messages, ceilings and Redis's memory.

Each check raises a ConfigurationError that names the setting, the figure and what would fit.
"""

from dataclasses import replace
from typing import Final

from penstock.broker.log.entry_memory import entry_bytes
from penstock.broker.log.guard import READ_BYTES
from penstock.broker.log.learner_records import Pacing
from penstock.broker.log.script import MOST_FETCHED
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import Algorithm, Retained
from penstock.learner.checkpoint.checkpointer import Room
from penstock.protocol.limits import (
    MAX_MESSAGE_BYTES,
    MAX_TENSORS,
    MESSAGE_OVERHEAD_BYTES,
    MIB,
    SLOT_BYTES,
    WEIGHT_CHUNK_BYTES,
)
from penstock.protocol.schema import FragmentSchema, payload_room
from penstock.protocol.specification import RunSpecification
from penstock.registry.records import MAX_PINNED

_WEIGHT_GENERATIONS: Final = 3
_PINS: Final = 2 + MAX_PINNED + 1
"""Evaluated ones; those that the registry keeps, and a copy that takes the place of one of them."""
_MEMORY_RESERVE_BYTES: Final = 64 * MIB
_INTERVALS: Final = 2
_HEADER_BYTES: Final = 256
"""Of a fragment beside its slots, about."""


def check_schema(schema: FragmentSchema) -> FragmentSchema:
    """Raises ConfigurationError for more tensors than a fragment may have."""
    if len(schema.tensors) > MAX_TENSORS:
        raise ConfigurationError(
            f"environment.id: its observation and action spaces make {len(schema.tensors)} tensors of a "
            f"fragment (two of each part of an observation), at most {MAX_TENSORS} are allowed; join parts "
            "of the spaces"
        )
    return schema


def check_fragment(settings: Settings, schema: FragmentSchema) -> None:
    """Refuse fragments whose payload a message cannot hold, where every environment ends an episode once."""
    length, count = settings.actor.unroll_length, settings.environment.count
    # Every slot may end once; where more episodes end than fit, the actor cuts the fragment early.
    if schema.most_ends(length, count) >= count:
        return
    fits = max((t for t in range(1, length) if schema.most_ends(t, count) >= count), default=0)
    remedy = f"use {fits}" if fits else "lower environment.count"
    raise ConfigurationError(
        f"actor.unroll_length={length}: a fragment of {count} environments has "
        f"{schema.fragment_bytes(length, count, count)} bytes, a message holds {payload_room(count)}; "
        f"{remedy}"
    )


def check_specification(specification: RunSpecification) -> RunSpecification:
    """Check that what actors will be told fits into a reply and can be read."""
    encoded, room = specification.encode(), MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES
    if len(encoded) > room:
        raise ConfigurationError(
            f"environment.id: the run specification has {len(encoded)} bytes, a message holds {room}; "
            "most of it are the bounds of the observation space: make the observations smaller"
        )
    return specification


def room_of(settings: Settings, schema: FragmentSchema, pacing: Pacing, algorithm: Algorithm) -> Room:
    """Return what the log holds beside the budget and what the algorithm retains.

    The check fails when that is less than two intervals.
    """
    count = settings.environment.count
    fragment = schema.fragment_bytes(settings.actor.unroll_length, count, count)
    fragments = -(-pacing.budget // pacing.fragment_charge) + settings.actor.count
    held = entry_bytes(fragment, _HEADER_BYTES + count * SLOT_BYTES)
    in_flight = fragments * held
    retained = _retained(algorithm, fragment)
    retained = replace(retained, size=retained.size * held // fragment)
    size = pacing.max_log_bytes - in_flight - retained.size
    entries = pacing.max_log_entries - fragments - retained.entries
    if size < _INTERVALS * in_flight or entries < _INTERVALS * fragments:
        kept = f" and replay {retained.size} bytes in at most {retained.entries}" if retained.entries else ""
        least = Retained(retained.size + 3 * in_flight, retained.entries + 3 * fragments)
        raise ConfigurationError(
            f"broker.max_log_bytes={pacing.max_log_bytes}, max_log_entries={pacing.max_log_entries}: the "
            f"budget alone is {in_flight} bytes in {fragments} fragments{kept}; give three times the budget"
            f"{' and what replay keeps' if kept else ''}: {least.size} bytes and {least.entries} entries"
        )
    return Room(size=size, entries=entries)


def _retained(algorithm: Algorithm, fragment_bytes: int) -> Retained:
    try:
        return algorithm.retains(fragment_bytes)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_memory(settings: Settings, weight_bytes: int, limit: int) -> None:
    """Raises ConfigurationError where ceilings and weights do not fit below `limit`, Redis's `maxmemory`.

    weight_bytes: size of one version. limit: in bytes, 0 for none.
    """
    broker = settings.broker
    fetched = MOST_FETCHED if weight_bytes > WEIGHT_CHUNK_BYTES else 0
    weight = (_WEIGHT_GENERATIONS + _PINS + fetched) * weight_bytes
    reads = settings.learner.ranks * READ_BYTES
    needed = broker.max_log_bytes + weight + broker.max_staged_bytes + reads + _MEMORY_RESERVE_BYTES
    if 0 < limit < needed:
        raise ConfigurationError(
            f"maxmemory={limit} of Redis: log {broker.max_log_bytes}, weights {weight}, staging "
            f"{broker.max_staged_bytes}, reads {reads} and reserve {_MEMORY_RESERVE_BYTES} need {needed}; "
            "raise broker.max_memory_bytes (maxmemory of a Redis of your own) or lower broker.max_log_bytes"
        )
