"""What a run learns with, made from its settings: spaces, policy, algorithm, schema, specification.

What cannot work is refused before the lease is taken, by a ConfigurationError that names the setting, the
figure and what would fit: what does not fit in `penstock.learner.model.capacity_checks`.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from penstock.broker.log.learner_records import Pacing
from penstock.config.settings import ConfigurationError, EnvironmentSection, PolicySection, Settings
from penstock.config.trusted import without_places
from penstock.config.workload import Workload, find, load
from penstock.learner.algorithms.algorithm import Algorithm, Imitator
from penstock.learner.algorithms.registry import check_hardware
from penstock.learner.algorithms.shared.rank_group import RankGroup, SingleRankGroup
from penstock.learner.checkpoint.checkpointer import Room
from penstock.learner.evaluation.base_comparison import check_base
from penstock.learner.evaluation.early_stopping import check_patience
from penstock.learner.model.capacity_checks import check_fragment, check_schema, check_specification, room_of
from penstock.learner.model.device import device_of
from penstock.learner.probe import Quarantine, Replica
from penstock.learner.recording.reader import Recording
from penstock.policy import weights
from penstock.protocol.ranges import Ranges
from penstock.protocol.schema import FragmentSchema, TensorRule, fragment_schema
from penstock.protocol.spaces import Dict, Space
from penstock.protocol.specification import Probe, RunSpecification

K = TypeVar("K", EnvironmentSection, PolicySection)
NO_STATE: Final = Dict(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Holds what a run learns with.

    target: mean return that counts as solved, or None.
    weight_bytes: size of one version of the weights.
    ranges: of the numbers in its fragments.
    """

    algorithm: Algorithm
    specification: RunSpecification
    ranges: Ranges
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
    """Return the model that the workload of the settings makes.

    Raises ConfigurationError for settings that do not fit together.

    group: the ranks that learn it together; None: this process alone. device: None: as the settings say.
    """
    check_patience(settings.evaluation)
    group = group or SingleRankGroup()
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


def target_of(settings: Settings, workload: Workload) -> float | None:
    """Return the configured mean return, else the workload's."""
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
    check_fragment(settings, schema)
    return check_specification(
        RunSpecification(
            run=settings.run,
            seed=settings.seed,
            environment_json=_sent(settings, _environment(settings)).canonical_json(),
            policy_json=_sent(settings, settings.policy).canonical_json(),
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
            max_reward=settings.broker.max_reward,
            max_log_prob=settings.broker.max_log_prob,
            final_masks=bool(schema.optional),
            session_timeout_ms=_milliseconds(settings.broker.session_timeout_s),
        )
    )


def _sent(settings: Settings, section: K) -> K:
    """The section as actors are told it: without the places of this machine."""
    workload = find(settings.workload)
    kwargs = without_places(section.kwargs, workload.places, workload.unsent)
    return section.model_copy(update={"kwargs": kwargs})


def _environment(settings: Settings) -> EnvironmentSection:
    """Return what the actors are told. Shaping has the discount that is learned with, where it names none."""
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


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
