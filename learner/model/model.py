"""What a run learns with, made from its settings: spaces, policy, algorithm, schema, specification.

Everything that cannot work is refused here, before the lease is taken, by a ConfigurationError that
names the setting, the figure and what would fit.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from broker.log.records import Pacing
from learner.algorithms.algorithm import Algorithm, Imitator, Retained
from learner.algorithms.registry import check_hardware
from learner.algorithms.shared.rank_group import RankGroup, SingleRankGroup
from learner.checkpoint.checkpointer import Room
from learner.evaluation.early_stopping import check_patience
from learner.probe import Quarantine, Replica
from learner.recording.reader import Recording
from penstock.config.settings import ConfigurationError, EnvironmentSection, Settings
from penstock.config.workload import Workload, find, load
from penstock.policy import weights
from penstock.registry.records import MAX_PINNED
from penstock.wire.limits import MAX_MESSAGE_BYTES, MAX_TENSORS, MESSAGE_OVERHEAD_BYTES, MIB
from penstock.wire.schema import (
    FragmentSchema,
    TensorRule,
    fragment_schema,
    payload_room,
)
from penstock.wire.spaces import Space
from penstock.wire.specification import Probe, RunSpecification

_WEIGHT_GENERATIONS: Final = 3
_PINS: Final = 2 + MAX_PINNED + 1
"""Evaluated ones; those that the registry keeps, and a copy that takes the place of one of them."""
_MEMORY_RESERVE_BYTES: Final = 64 * MIB
_INTERVALS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """target: mean return that counts as solved, or None. weight_bytes: size of one version of the weights."""

    algorithm: Algorithm
    specification: RunSpecification
    quarantine: Quarantine
    pacing: Pacing
    room: Room
    weight_bytes: int
    device: torch.device
    target: float | None
    recording: Recording | None = None
    """What is learned from in place of actors."""


def make_model(
    settings: Settings, group: RankGroup | None = None, device: torch.device | None = None
) -> Model:
    """As the workload of the settings makes it; raises ConfigurationError for settings that do not fit together.

    group: the ranks that learn it together; None: this process alone. device: None: as the settings say.
    """
    check_patience(settings.evaluation)
    group = group or SingleRankGroup()
    check_hardware(settings, group.size)
    workload = find(settings.workload)
    model: Model = load(workload.model)(settings, workload, group, device or device_of(settings))
    return model


def model_of(
    settings: Settings,
    algorithm: Algorithm,
    replica: Replica,
    spaces: tuple[Space, Space],
    probe: Probe,
    device: torch.device,
    target: float | None,
    extra: tuple[TensorRule, ...] = (),
) -> Model:
    """A model of any algorithm. spaces: of observation and action. replica: see `Quarantine`.

    extra: tensors that fragments carry for the policy: masks and state.
    """
    schema = check_schema(fragment_schema(*spaces, (*extra, *algorithm.requires())))
    specification = _specification(settings, *spaces, schema, probe, algorithm)
    pacing = _pacing(settings, algorithm)
    return Model(
        algorithm=algorithm,
        specification=specification,
        quarantine=Quarantine(probe, replica, settings.learner.probe_tolerance),
        pacing=pacing,
        room=_room(settings, schema, pacing, algorithm),
        weight_bytes=len(weights.encode(algorithm.published_modules()["default"])),
        device=device,
        target=target,
        recording=_recording(settings, algorithm, schema),
    )


def _recording(settings: Settings, algorithm: Algorithm, schema: FragmentSchema) -> Recording | None:
    """The one that is learned from; refused when it is of other spaces, or none where there must be one."""
    folder = settings.learner.feed_from
    if folder is None:
        if isinstance(algorithm, Imitator):
            raise ConfigurationError(
                f"algorithm.name={settings.algorithm.name!r}: imitates a recording; name it with --from"
            )
        return None
    recording = Recording(folder)
    recording.check_schema(schema.schema_id)
    if not recording.fragments:
        raise ConfigurationError(f"learner.feed_from={str(folder)!r}: holds no fragment")
    return recording


def device_of(settings: Settings, index: int = 0) -> torch.device:
    """Where a process learns. index: which of this machine's ranks it is; each has a GPU of its own.

    Raises ConfigurationError when there is no such GPU.
    """
    name = settings.learner.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("learner.device='cuda': torch sees no CUDA device; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"learner.device={settings.learner.device!r}: rank {index} of this machine has no GPU of its own, "
            f"torch sees {torch.cuda.device_count()}; start as many ranks as there are, or say device=cpu"
        )
    return torch.device(name, index)


def target_of(settings: Settings, workload: Workload) -> float | None:
    """The configured mean return, else the workload's."""
    if settings.learner.target_return is not None:
        return settings.learner.target_return
    target: Any = load(workload.target)(settings.environment)
    return None if target is None else float(target)


def _specification(
    settings: Settings,
    observation: Space,
    action: Space,
    schema: FragmentSchema,
    probe: Probe,
    algorithm: Algorithm,
) -> RunSpecification:
    _check_fragment(settings, schema)
    return check_specification(
        RunSpecification(
            run=settings.run,
            seed=settings.seed,
            environment_json=_environment(settings).canonical_json(),
            policy_json=settings.policy.canonical_json(),
            # Where this machine keeps what is nothing to the actors of others.
            actor_json=settings.actor.model_copy(update={"ack_journal": None, "places": {}}).canonical_json(),
            evaluation_json=settings.evaluation.canonical_json(),
            workload=settings.workload,
            observation_space=observation,
            action_space=action,
            schema=schema,
            probe=probe,
            unroll_length=settings.actor.unroll_length,
            lock_step=algorithm.lock_step,
            stale_after=algorithm.stale_after or 0,
            update_steps=settings.algorithm.update_steps,
            session_timeout_ms=_milliseconds(settings.broker.session_timeout_s),
        )
    )


def _environment(settings: Settings) -> EnvironmentSection:
    """What the actors are told: shaping with the discount that is learned with, where it names none."""
    told = []
    for wrapper in settings.environment.reward:
        if wrapper.shape is None:
            told.append(wrapper)
            continue
        try:
            load(wrapper.shape)
        except ConfigurationError as error:
            raise ConfigurationError(f"environment.reward: shape={error}") from error
        discount = settings.algorithm.discount if wrapper.discount is None else wrapper.discount
        told.append(wrapper.model_copy(update={"discount": discount}))
    return settings.environment.model_copy(update={"reward": tuple(told)})


def check_schema(schema: FragmentSchema) -> FragmentSchema:
    """Raises ConfigurationError for more tensors than a fragment may have."""
    if len(schema.tensors) > MAX_TENSORS:
        raise ConfigurationError(
            f"environment.id: its observation and action spaces make {len(schema.tensors)} tensors of a fragment "
            f"(two of each part of an observation), at most {MAX_TENSORS} are allowed; join parts of the spaces"
        )
    return schema


def _check_fragment(settings: Settings, schema: FragmentSchema) -> None:
    length, count = settings.actor.unroll_length, settings.environment.count
    # Every slot may end once; where more episodes end than fit, the actor cuts the fragment early.
    if schema.most_ends(length, count) >= count:
        return
    fits = max((t for t in range(1, length) if schema.most_ends(t, count) >= count), default=0)
    remedy = f"use {fits}" if fits else "lower environment.count"
    raise ConfigurationError(
        f"actor.unroll_length={length}: a fragment of {count} environments has "
        f"{schema.fragment_bytes(length, count, count)} bytes, a message holds {payload_room(count)}; {remedy}"
    )


def check_specification(specification: RunSpecification) -> RunSpecification:
    """What actors will be told must fit into a reply and be readable."""
    encoded, room = specification.encode(), MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES
    if len(encoded) > room:
        raise ConfigurationError(
            f"environment.id: the run specification has {len(encoded)} bytes, a message holds {room}; "
            "most of it are the bounds of the observation space: make the observations smaller"
        )
    return specification


def _pacing(settings: Settings, algorithm: Algorithm) -> Pacing:
    charge = settings.actor.unroll_length * settings.environment.count
    try:
        budget = algorithm.budget(charge)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return Pacing(
        budget=budget,
        fragment_charge=charge,
        actor_count=settings.actor.count,
        lock_step=algorithm.lock_step,
        session_timeout_ms=_milliseconds(settings.broker.session_timeout_s),
        max_log_bytes=settings.broker.max_log_bytes,
        max_log_entries=settings.broker.max_log_entries,
    )


def _room(settings: Settings, schema: FragmentSchema, pacing: Pacing, algorithm: Algorithm) -> Room:
    """What the log holds beside the budget and what the algorithm retains; refused when that is not two intervals' worth."""
    count = settings.environment.count
    fragment = schema.fragment_bytes(settings.actor.unroll_length, count, count)
    fragments = -(-pacing.budget // pacing.fragment_charge) + settings.actor.count
    in_flight = fragments * fragment
    retained = _retained(algorithm, fragment)
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
    weight = (_WEIGHT_GENERATIONS + _PINS) * weight_bytes
    needed = broker.max_log_bytes + weight + broker.max_staged_bytes + _MEMORY_RESERVE_BYTES
    if 0 < limit < needed:
        raise ConfigurationError(
            f"maxmemory={limit} of Redis: log {broker.max_log_bytes}, weights {weight}, staging "
            f"{broker.max_staged_bytes} and reserve {_MEMORY_RESERVE_BYTES} need {needed}; raise "
            "broker.max_memory_bytes (maxmemory of a Redis of your own) or lower broker.max_log_bytes"
        )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def use_threads(settings: Settings) -> None:
    """Bound torch's own threads before anything is computed; call once, early."""
    torch.set_num_threads(settings.learner.threads)
