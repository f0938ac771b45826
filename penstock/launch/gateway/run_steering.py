"""Controls the runs of jobs: orders go to a run's broker, decisions about versions to its registry."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import NoPlainFile
from penstock.gateway.jobs import job_records
from penstock.gateway.jobs.job_records import Action, CannotSteer, Order, VersionFile
from penstock.launch.control.control_calls import message_json, opened_for
from penstock.launch.policy.policy_versions import (
    RegistryPolicy,
    Wish,
    find_place,
    opened,
    rolled_back,
    traffic_json,
    version_json,
    wished,
)
from penstock.registry.records import Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import open_kept
from penstock.runtime.exit import Fatal, NoAnswer

_STATES = frozenset({Action.PAUSE, Action.RESUME, Action.STOP})
"""Orders that set a state; the others are commands that the learner answers."""


class RunSteering:
    """`Steering` of runs by their folders.

    folder_of: returns the folder of a run by the job's id. registry, policy: URL of the registry and name of
    the policy of all these runs; None: those in the configuration of each run, which was made here.
    """

    def __init__(
        self, folder_of: Callable[[str], Path], registry: str | None = None, policy: str | None = None
    ) -> None:
        self._run, self._registry, self._policy = folder_of, registry, policy

    def of(self, policy: str) -> Self:
        return type(self)(self._run, self._registry, None if self._registry is None else policy)

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        call = order.action.capitalize()
        with _refusals(), opened_for(str(self._run(job)), None, ()) as calls:
            if order.action in _STATES:
                state, revision = calls.wanted(call, order.reason)
                return {"desired": state, "revision": revision}
            about = {"min_steps": order.min_steps} if order.action is Action.FLUSH else {"name": order.name}
            ask = calls.command(call, request_id=order.request_id, reason=order.reason, **about)
            return message_json(calls.called(ask))

    def versions(self, job: str) -> Mapping[str, Any]:
        """Return the registered versions of the policy that a run trains, and its traffic."""
        run = self._run(job)
        with _refusals():
            if not run.is_dir():
                return {"versions": [], "traffic": None}
            place = self._place(run)
            if _is_absent(place.url):
                return {"versions": [], "traffic": None}
            with opened(place) as registry:
                found = registry.list(place.policy)
                traffic, labels = registry.traffic(place.policy), registry.labels(place.policy)
        named = {number: label for label, number in labels.items()}
        shown = [version_json(one) | {"label": named.get(one.version)} for one in found]
        return {"versions": shown, "traffic": traffic_json(traffic)}

    def weights(self, job: str, version: int | str) -> VersionFile:
        """Return a registered version as a file, if its bytes are those that were registered."""
        with _refusals():
            place = self._place(self._run(job))
            with opened(place) as registry:
                found = registry.get(place.policy, _number(registry, place, version))
            assert place.folder is not None
            content = open_kept(place.folder, found)
        return VersionFile(name=f"{found.policy}-{found.version}.safetensors", content=content)

    def promote(
        self, job: str, version: int | str, *, to: str, canary_share: float | None, reason: str, by: str
    ) -> Mapping[str, Any]:
        with _refusals():
            place = self._place(self._run(job))
            with opened(place, to_write=True) as registry:
                number, wanted = _number(registry, place, version), Status(to)
                made = registry.promote(
                    place.policy, number, reason, by=by, to=wanted, canary_share=canary_share
                )
        return version_json(made)

    def roll_back(self, job: str, version: int | str | None, *, reason: str, by: str) -> Mapping[str, Any]:
        with _refusals():
            place = self._place(self._run(job))
            with opened(place) as registry:
                number = None if version is None else _number(registry, place, version)
            return rolled_back(place, number, reason, by=by)[0]

    def set_traffic(self, job: str, *, reason: str, by: str, **change: Any) -> Mapping[str, Any]:
        with _refusals():
            place = self._place(self._run(job))
            with opened(place, to_write=True) as registry:
                now = registry.traffic(place.policy)
                return traffic_json(registry.set_traffic(wished(now, Wish(**change)), reason, by=by))

    def _place(self, run: Path) -> RegistryPolicy:
        return find_place(str(run), self._registry, self._policy)


class PodSteering(RunSteering):
    """Controls runs in pods: their files and registry can be reached, their brokers cannot."""

    def order(self, job: str, order: Order) -> Mapping[str, Any]:
        """Refuse: the broker of such a run listens inside its pod only."""
        raise CannotSteer(
            f"{order.action}: the run of this job is in a pod, which takes no orders; its job may be "
            "cancelled, and its versions promoted and rolled back"
        )


def _number(registry: Registry, place: RegistryPolicy, version: int | str) -> int:
    return version if isinstance(version, int) else registry.number(place.policy, version)


def _is_absent(url: str) -> bool:
    """Return whether a registry is a file that does not exist yet."""
    file = url.removeprefix("sqlite:///")
    return file != url and not Path(file).exists()


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise errors of the block as the gateway's CannotSteer and NoAnswer."""
    try:
        yield
    except NoAnswer as error:
        raise job_records.NoAnswer(str(error)) from error
    except NoPlainFile as error:
        raise CannotSteer(error.strerror) from error
    except (ConfigurationError, Fatal, OSError, ValueError) as error:
        raise CannotSteer(str(error)) from error
