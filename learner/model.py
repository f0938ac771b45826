"""The model of a run, made from its settings: spaces, policy, algorithm, schema, specification.

Settings that cannot work are refused before the lease is taken, by a ConfigurationError that names the
setting, the figure and a value that would fit.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch

from penstock.broker.log.connection import READ_BYTES
from penstock.broker.log.replies import Pacing
from penstock.broker.log.script import MOST_FETCHED, entry_bytes
from penstock.config.settings import ConfigurationError, EnvironmentSection, PolicySection, Settings
from penstock.config.trusted import without_places
from penstock.config.workload import Workload, find, load, place_keys
from penstock.learner.algorithms.algorithm import Algorithm, Imitator, LogShare
from penstock.learner.algorithms.gradient import hardware_of
from penstock.learner.algorithms.registry import HardwareMaker, check_hardware, make
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.evaluation import check_base, check_patience
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.probe import Quarantine, Replica, make_probe
from penstock.policy import weights
from penstock.policy.policy import Policy
from penstock.protocol import limits
from penstock.protocol.schema import (
    FragmentSchema,
    Ranges,
    TensorRule,
    fragment_schema,
    mask_rules,
    payload_room,
    state_rules,
)
from penstock.protocol.spaces import Dict, Space
from penstock.protocol.specification import Probe, RunSpecification
from penstock.registry.records import MAX_PINNED

log = logging.getLogger(__name__)

K = TypeVar("K", EnvironmentSection, PolicySection)
R = TypeVar("R")

# ---- Checks whether a run fits.

_WEIGHT_GENERATIONS: Final = 3
_PINS: Final = 2 + MAX_PINNED + 1
"""Pinned versions: those being evaluated, those that the registry keeps, and a copy that replaces one."""
_MEMORY_RESERVE_BYTES: Final = 64 * limits.MIB
_INTERVALS: Final = 2
_HEADER_BYTES: Final = 256
"""About the size of a fragment's header without its slots."""


def check_schema(schema: FragmentSchema) -> FragmentSchema:
    if len(schema.tensors) > limits.MAX_TENSORS:
        raise ConfigurationError(
            f"environment.id: its observation and action spaces make {len(schema.tensors)} tensors of a "
            f"fragment (two of each part of an observation), at most {limits.MAX_TENSORS} are allowed; join "
            "parts of the spaces"
        )
    return schema


def fitted(settings: Settings, schema: FragmentSchema) -> Settings:
    """Return the settings with fragments as short as a message needs, when every slot ends one episode."""
    length, count = settings.actor.unroll_length, settings.environment.count
    # Where more episodes end than fit, the actor cuts the fragment early.
    if schema.most_ends(length, count) >= count:
        return settings
    fits = max((t for t in range(1, length) if schema.most_ends(t, count) >= count), default=0)
    if fits <= settings.policy.burn_in:
        raise ConfigurationError(
            f"environment.count={count}: a fragment of {fits + 1} steps of so many environments has "
            f"{schema.fragment_bytes(fits + 1, count, count)} bytes, a message holds {payload_room(count)}; "
            "lower environment.count"
        )
    words = {"unroll_length": length, "environments": count, "steps": fits}
    log.warning("fragments are shorter than set: a message holds so many steps", extra=words)
    return settings.model_copy(update={"actor": settings.actor.model_copy(update={"unroll_length": fits})})


def check_specification(specification: RunSpecification) -> RunSpecification:
    """Check that the specification for actors fits into a message."""
    encoded, room = specification.encode(), limits.MAX_MESSAGE_BYTES - limits.MESSAGE_OVERHEAD_BYTES
    if len(encoded) > room:
        raise ConfigurationError(
            f"environment.id: the run specification has {len(encoded)} bytes, a message holds {room}; "
            "most of it are the bounds of the observation space: make the observations smaller"
        )
    return specification


def room_of(settings: Settings, schema: FragmentSchema, pacing: Pacing, algorithm: Algorithm) -> LogShare:
    """Return the log's room without budget and retained entries; refuses less than two intervals."""
    count = settings.environment.count
    fragment = schema.fragment_bytes(settings.actor.unroll_length, count, count)
    fragments = -(-pacing.budget // pacing.fragment_charge) + settings.actor.count
    held = entry_bytes(fragment, _HEADER_BYTES + count * limits.SLOT_BYTES)
    in_flight = fragments * held
    retained = _limit_of(algorithm.retains, fragment)
    retained = replace(retained, size=retained.size * held // fragment)
    size = pacing.max_log_bytes - in_flight - retained.size
    entries = pacing.max_log_entries - fragments - retained.entries
    if size < _INTERVALS * in_flight or entries < _INTERVALS * fragments:
        kept = f" and replay {retained.size} bytes in at most {retained.entries}" if retained.entries else ""
        least = LogShare(retained.size + 3 * in_flight, retained.entries + 3 * fragments)
        raise ConfigurationError(
            f"broker.max_log_bytes={pacing.max_log_bytes}, max_log_entries={pacing.max_log_entries}: the "
            f"budget alone is {in_flight} bytes in {fragments} fragments{kept}; give three times the budget"
            f"{' and what replay keeps' if kept else ''}: {least.size} bytes and {least.entries} entries"
        )
    return LogShare(size=size, entries=entries)


def _limit_of(limit: Callable[[int], R], figure: int) -> R:
    """Return an algorithm's limit; raises ConfigurationError where it raises ValueError."""
    try:
        return limit(figure)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_memory(settings: Settings, weight_bytes: int, limit: int) -> None:
    """Raises ConfigurationError where ceilings and weights do not fit below `limit`, Redis's `maxmemory`.

    weight_bytes: size of one version. limit: in bytes, 0 for none.
    """
    broker = settings.broker
    fetched = MOST_FETCHED if weight_bytes > limits.WEIGHT_CHUNK_BYTES else 0
    weight = (_WEIGHT_GENERATIONS + _PINS + fetched) * weight_bytes
    reads = settings.learner.ranks * READ_BYTES
    needed = broker.max_log_bytes + weight + broker.max_staged_bytes + reads + _MEMORY_RESERVE_BYTES
    if 0 < limit < needed:
        raise ConfigurationError(
            f"maxmemory={limit} of Redis: log {broker.max_log_bytes}, weights {weight}, staging "
            f"{broker.max_staged_bytes}, reads {reads} and reserve {_MEMORY_RESERVE_BYTES} need {needed}; "
            "raise broker.max_memory_bytes (maxmemory of a Redis of your own) or lower broker.max_log_bytes"
        )


# ---- The device and the threads of a process.


def device_of(settings: Settings, index: int = 0) -> torch.device:
    """Return the device of a process. index: its rank on this machine; each rank has its own GPU.

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
            f"learner.device={settings.learner.device!r}: rank {index} of this machine has no GPU of its "
            f"own, torch sees {torch.cuda.device_count()}; start as many ranks as there are, or use "
            "device=cpu"
        )
    return torch.device(name, index)


def use_threads(settings: Settings) -> None:
    torch.set_num_threads(settings.learner.threads)


NO_STATE: Final = Dict(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Algorithm, specification and limits of a run. target: mean return that counts as solved.

    weight_bytes: size of one version of the weights. ranges: allowed numbers in fragments. recording: it
    replaces actors as the source of experience.
    """

    algorithm: Algorithm
    specification: RunSpecification
    ranges: Ranges
    quarantine: Quarantine
    pacing: Pacing
    room: LogShare
    weight_bytes: int
    device: torch.device
    target: float | None
    recording: Recording | None = None


def make_model(
    settings: Settings, group: RankGroup | None = None, device: torch.device | None = None
) -> Model:
    """Return the model that the workload of the settings makes.

    group: the ranks that learn it together; None: this process alone. device: None: that of the settings.
    Raises ConfigurationError for settings that do not fit together.
    """
    check_patience(settings.evaluation)
    group = group or RankGroup()
    check_hardware(settings, group.size)
    workload = find(settings.workload)
    check_base(settings.evaluation, workload)
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
    state: Space = NO_STATE,
) -> Model:
    """Return a model of any algorithm. spaces: of observation and action. replica: see `Quarantine`.

    extra: tensors that fragments carry for the policy: masks and state. state: space of the policy's state.
    """
    schema = check_schema(fragment_schema(*spaces, (*extra, *algorithm.requires())))
    settings = fitted(settings, schema)
    specification = _specification(settings, *spaces, schema, probe, algorithm)
    pacing = _pacing(settings, algorithm)
    return Model(
        algorithm=algorithm,
        specification=specification,
        ranges=Ranges.of_run(*spaces, state),
        quarantine=Quarantine(probe, replica, settings.learner.probe_tolerance),
        pacing=pacing,
        room=room_of(settings, schema, pacing, algorithm),
        weight_bytes=len(weights.encode(algorithm.published_modules()["default"])),
        device=device,
        target=target,
        recording=_recording(settings, algorithm, schema),
    )


def _recording(settings: Settings, algorithm: Algorithm, schema: FragmentSchema) -> Recording | None:
    """Return the recording to learn from; refuses one of other spaces, and none where one is required."""
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


def target_of(settings: Settings, workload: Workload) -> float | None:
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
    return check_specification(
        RunSpecification(
            run=settings.run,
            seed=settings.seed,
            environment_json=_sent(settings, _environment(settings)).canonical_json(),
            policy_json=_sent(settings, settings.policy).canonical_json(),
            # Places on this machine mean nothing to actors of others.
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
            max_reward=settings.broker.max_reward,
            max_log_prob=settings.broker.max_log_prob,
            final_masks=bool(schema.optional),
            session_timeout_ms=_milliseconds(settings.broker.session_timeout_s),
        )
    )


def _sent(settings: Settings, section: K) -> K:
    """Return a section for actors, without the places of this machine."""
    workload = find(settings.workload)
    keys = place_keys(settings.workload, settings.environment.id)
    kwargs = without_places(section.kwargs, keys, workload.unsent)
    return section.model_copy(update={"kwargs": kwargs})


def _environment(settings: Settings) -> EnvironmentSection:
    """Return the section for actors. Shaping without a discount gets that of the algorithm."""
    wrappers = []
    for wrapper in settings.environment.reward:
        if wrapper.shape is None:
            wrappers.append(wrapper)
            continue
        try:
            load(wrapper.shape)
        except ConfigurationError as error:
            raise ConfigurationError(f"environment.reward: shape={error}") from error
        discount = settings.algorithm.discount if wrapper.discount is None else wrapper.discount
        wrappers.append(wrapper.model_copy(update={"discount": discount}))
    return settings.environment.model_copy(update={"reward": tuple(wrappers)})


def _pacing(settings: Settings, algorithm: Algorithm) -> Pacing:
    charge = settings.actor.unroll_length * settings.environment.count
    return Pacing(
        budget=_limit_of(algorithm.budget, charge),
        fragment_charge=charge,
        actor_count=settings.actor.count,
        lock_step=algorithm.lock_step,
        session_timeout_ms=_milliseconds(settings.broker.session_timeout_s),
        max_log_bytes=settings.broker.max_log_bytes,
        max_log_entries=settings.broker.max_log_entries,
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


# ---- The model of a run that acts step by step.


def make_step_model(
    settings: Settings,
    workload: Workload,
    group: RankGroup,
    device: torch.device,
    algorithms: Mapping[str, HardwareMaker] = MappingProxyType({}),
) -> Model:
    """Return the model of a workload with observations and actions of fixed size.

    Its policy makes one forward pass per step.

    Args:
        settings: of the run.
        workload: what the run does.
        group: the ranks that learn it together.
        device: where this rank learns.
        algorithms: the workload's own, by `algorithm.name`, in addition to the core's.

    Raises:
        ConfigurationError: settings do not fit together.
    """
    observation, action = load(workload.spaces)(settings.environment)
    settings = settings.model_copy(update={"policy": settings.algorithm.policy_section(settings.policy)})
    policies = [_build(workload, settings, observation, action) for _ in range(2)]
    algorithm = make(
        policies[0].to(device),
        settings.algorithm,
        seed=settings.seed,
        hardware=hardware_of(settings.learner, group),
        own=algorithms,
    )
    probe = make_probe(observation, policies[1], settings.seed)
    target = target_of(settings, workload)
    extra = (*_mask_rules(settings, action), *state_rules(policies[1].state_space))
    spaces, state = (observation, action), policies[1].state_space
    return model_of(settings, algorithm, policies[1], spaces, probe, device, target, extra, state)


def _mask_rules(settings: Settings, action: Space) -> tuple[TensorRule, ...]:
    key = settings.environment.mask_key
    rules = mask_rules(action) if key else ()
    if key and not rules:
        raise ConfigurationError(
            f"environment.mask_key={key!r}: the actions {action} are no choices of one of n, which alone "
            "take a mask; leave it empty"
        )
    return rules


def _build(workload: Workload, settings: Settings, observation: Space, action: Space) -> Policy:
    _check_state(settings)
    try:
        policy: Policy = load(workload.policy)(observation, action, settings.policy, settings.seed)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"environment.id={settings.environment.id!r}: {error}") from error
    policy.seed_actions(settings.seed)
    return policy


def _check_state(settings: Settings) -> None:
    policy, length = settings.policy, settings.actor.unroll_length
    if policy.burn_in and policy.recurrent == "none":
        raise ConfigurationError(
            f"policy.burn_in={policy.burn_in}: policy.recurrent='none' has no state to refresh; set it to 0"
        )
    if policy.burn_in >= length:
        raise ConfigurationError(
            f"policy.burn_in={policy.burn_in}: nothing is left to learn from of actor.unroll_length={length} "
            "steps; lower the one or raise the other"
        )
