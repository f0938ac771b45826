"""From a command line to what a run will do: resolved settings and the run's folder.

Layers, each over the one before: the workload's defaults for environment and algorithm, the TOML file,
the process environment, the flags, `--set`. Every mistake is a ConfigurationError that names the key.
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actor.rollout.reward import potentials
from launch.run.local_places import places_of
from learner.recording.recording_index import DESCRIPTION
from penstock.config import settings as configuration
from penstock.config import toml_text
from penstock.config.settings import ActorSection, ConfigurationError, RegistrySection, Section, Settings
from penstock.config.trusted import module_of
from penstock.config.workload import find, load
from penstock.wire.ids import new_run_name

CONFIG_FILE = "config.toml"
LOCK_FILE = "launcher.lock"
TRACES = "traces"
_OF_A_SERVER = ("serving", "registry", "canary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; None: not said."""

    what: str | None = None
    run_dir: Path | None = None
    resume: bool = False
    allow_loss: bool = False
    best: bool = False
    actors: int | None = None
    ranks: int | None = None
    serve_at: str | None = None
    seed: int | None = None
    target_return: float | None = None
    total_steps: int | None = None
    redis: str | None = None
    recording: Path | None = None
    assignments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can be started. `target`: mean return that counts as solved, None: there is none."""

    settings: Settings
    run_dir: Path
    resume: bool
    allow_loss: bool
    best: bool
    target: float | None

    @property
    def config(self) -> Path:
        """The run's configuration file."""
        return self.run_dir / CONFIG_FILE


def make_plan(request: Request) -> Plan:
    """Resolve a request; touches no file."""
    if request.best and not request.resume:
        raise ConfigurationError("--best: goes back in a run that is resumed; add --resume")
    if request.resume:
        run_dir = _resumed_folder(request)
        settings = resolve(configuration.parse_run_config(run_dir / CONFIG_FILE), request)
    else:
        settings = resolve(_first_layer(request.what), request)
        name = new_run_name(settings.run or settings.environment.id.rpartition(":")[2])
        sections = {"actor": _allowing_modules(settings), "registry": _following_the_learner(settings)}
        settings = settings.model_copy(update={"run": name, **sections})
        settings = settings.model_copy(update=_from_recording(settings, request.recording))
        run_dir = _fresh_folder(request.run_dir or Path("runs") / name)
    settings = _with_absolute_folders(settings, run_dir)
    _check_actors(settings)
    target = settings.learner.target_return
    known = load(find(settings.workload).target)(settings.environment)
    return Plan(
        settings=settings,
        run_dir=run_dir,
        resume=request.resume,
        allow_loss=request.allow_loss,
        best=request.best,
        target=known if target is None else target,
    )


def _following_the_learner(settings: Settings) -> RegistrySection:
    """Clients of a run that learns from them stay on its newest weights, unless the user has said otherwise."""
    section = settings.registry
    if not settings.serving.listen or "activate_first" in section.model_fields_set:
        return section
    return section.model_copy(update={"activate_first": False})


def _from_recording(settings: Settings, recording: Path | None) -> dict[str, Section]:
    """Nobody acts, and what is read is not recorded again."""
    if recording is None:
        return {}
    if not (recording / DESCRIPTION).is_file():
        raise ConfigurationError(f"--from {recording}: holds no {DESCRIPTION}, so no recording")
    source = {"feed_from": recording.absolute(), "record": None}
    return {
        "actor": settings.actor.model_copy(update={"count": 0}),
        "learner": settings.learner.model_copy(update=source),
    }


def _check_actors(settings: Settings) -> None:
    if settings.learner.feed_from is not None:
        return
    if settings.actor.count == 0 and not settings.serving.listen:
        raise ConfigurationError(
            "actor.count=0: nobody would act; say --actors N, or --serve ADDRESS for clients that do"
        )
    if settings.actor.count == 0 and settings.algorithm.lock_step:
        raise ConfigurationError(
            "algorithm.staleness=0: lock-step waits for rollout workers, and actor.count=0 starts none; "
            "say --set algorithm.staleness=1"
        )


def resolve(first: Mapping[str, Any], request: Request) -> Settings:
    """Lay environment, flags and assignments over `first`, and all of it over the workload's defaults."""
    layers = [first, configuration.from_environment(), _flags(request)]
    layers += [configuration.parse_assignment(text) for text in request.assignments]
    return over_defaults(layers)


def local_settings(run_dir: Path, assignments: tuple[str, ...] = ()) -> Settings:
    """What this machine allows a run to import and where it has things: the run's own configuration, where it is here.

    assignments: what was said besides; it wins.
    """
    config = run_dir / CONFIG_FILE
    said = [configuration.parse_assignment(one) for one in assignments]
    if not config.exists():
        return configuration.load(said)
    settings = configuration.load([configuration.parse_run_config(config), *said])
    actor = settings.actor.model_copy(update={"places": places_of(settings)})
    return settings.model_copy(update={"actor": actor})


def over_defaults(layers: Sequence[Mapping[str, Any]]) -> Settings:
    """The layers over the workload's defaults for the environment and the algorithm that they name."""
    asked = configuration.load(layers)
    defaults = load(find(asked.workload).defaults)(asked.environment.id, asked.algorithm.name)
    return configuration.load([defaults, *layers])


def service_settings(
    config: Path | None,
    assignments: tuple[str, ...],
    secret: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
) -> Settings:
    """Settings of one service in the foreground: file, environment, `--set`, the secret of its Redis URL.

    run_dir: of the run that is served; what its own configuration says of that lies below all of them.
    """
    return configuration.load([_serving_layer(run_dir), *_service_layers(config, assignments, secret)])


def learner_settings(
    config: Path | None, assignments: tuple[str, ...], secret: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of a learner, who decides what all others do: as `service_settings`, over the defaults of `train`."""
    return over_defaults(_service_layers(config, assignments, secret))


def _serving_layer(run_dir: Path | None) -> dict[str, Any]:
    """Whose versions are served and how, and what their policy may import; nothing where the run's configuration is not here."""
    if run_dir is None or not (run_dir / CONFIG_FILE).exists():
        return {}
    local = local_settings(run_dir)
    written = configuration.parse_run_config(run_dir / CONFIG_FILE)
    return {
        "run": local.run,
        "actor": {"allow_modules": local.actor.allow_modules, "places": local.actor.places},
        **{name: written[name] for name in _OF_A_SERVER if name in written},
    }


def _service_layers(
    config: Path | None, assignments: tuple[str, ...], secret: Mapping[str, Any] | None
) -> list[Mapping[str, Any]]:
    file = [_parse(config)] if config else []
    said = [configuration.parse_assignment(text) for text in assignments]
    return [*file, configuration.from_environment(), *said, secret or {}]


def _parse(config: Path) -> dict[str, Any]:
    """A file that was named; a run's own, which the launcher's lock lies beside, may hold keys of an earlier version."""
    of_a_run = config.name == CONFIG_FILE and (config.parent / LOCK_FILE).exists()
    return configuration.parse_run_config(config) if of_a_run else configuration.parse_toml(config)


@contextmanager
def held_folder(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder, made if it is not there; raises ConfigurationError while another launcher holds it.

    Two launchers of one run would fence each other's learners off. The kernel lets go when this process ends.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"run_dir={run_dir}: another `penstock train` has this run in hand; stop it first"
            ) from None
        yield


def make_folders(plan: Plan) -> None:
    """The run's folder and those for logs and endpoints."""
    (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (plan.run_dir / "endpoints").mkdir(exist_ok=True)


def prepare_folder(plan: Plan) -> None:
    """Make the run's folder and its configuration file."""
    make_folders(plan)
    temporary = plan.config.with_suffix(".tmp")
    temporary.write_text(toml_text.dump(plan.settings))
    temporary.replace(plan.config)


def _allowing_modules(settings: Settings) -> ActorSection:
    """The user named the modules of environment, rewards and network here, so the actors that we start may import them."""
    names = (settings.environment.id, settings.policy.network, *potentials(settings.environment))
    named = {module_of(name) for name in names} - {""}
    new = sorted(named - set(settings.actor.allow_modules))
    if not new:
        return settings.actor
    return settings.actor.model_copy(update={"allow_modules": (*settings.actor.allow_modules, *new)})


def _with_absolute_folders(settings: Settings, run_dir: Path) -> Settings:
    """Whoever reads the run's configuration later stands in another folder. Traces lie with the run."""
    sections: dict[str, Section] = {}
    if settings.actor.ack_journal is not None:
        journal = {"ack_journal": settings.actor.ack_journal.absolute()}
        sections["actor"] = settings.actor.model_copy(update=journal)
    if settings.learner.record is not None:
        record = {"record": settings.learner.record.absolute()}
        sections["learner"] = settings.learner.model_copy(update=record)
    if settings.tracing.exporter == "file":
        folder = {"folder": (settings.tracing.folder or run_dir / TRACES).absolute()}
        sections["tracing"] = settings.tracing.model_copy(update=folder)
    return settings.model_copy(update=sections)


def _first_layer(what: str | None) -> dict[str, Any]:
    if what is None:
        raise ConfigurationError("train: name a Gymnasium environment such as CartPole-v1, or a .toml file")
    if what.endswith(".toml"):
        return configuration.parse_toml(Path(what))
    return {"environment": {"id": what}}


def _flags(request: Request) -> dict[str, Any]:
    flags = {
        "seed": request.seed,
        "actor": {"count": request.actors},
        "learner": {
            "target_return": request.target_return,
            "total_steps": request.total_steps,
            "ranks": request.ranks,
        },
        "broker": {"redis": request.redis},
        "serving": {"listen": request.serve_at},
    }
    return _said(flags)


def _said(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _said(value) if isinstance(value, Mapping) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value not in (None, {})}


def _resumed_folder(request: Request) -> Path:
    named = request.run_dir or (Path(request.what) if request.what else None)
    if named is None:
        raise ConfigurationError("--resume: name the run's folder, as in `penstock train --resume runs/NAME`")
    if not (named / CONFIG_FILE).is_file():
        raise ConfigurationError(f"--resume {named}: holds no {CONFIG_FILE}, so no run; see `ls runs`")
    return named.resolve()


def _fresh_folder(run_dir: Path) -> Path:
    if (run_dir / CONFIG_FILE).exists():
        raise ConfigurationError(f"--run-dir {run_dir}: holds a run already; add --resume or choose another")
    return run_dir.resolve()
