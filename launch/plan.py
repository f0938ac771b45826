"""From a command line to what a run will do: resolved settings and the run's folder.

Layers, each over the one before: the workload's defaults for the environment, the TOML file, the
process environment, the flags, `--set`. Every mistake is a ConfigurationError that names the key.
"""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import toml
from penstock.runtime import settings as configuration
from penstock.runtime.settings import ActorSection, ConfigurationError, Section, ServingSection, Settings
from penstock.runtime.workload import find, load
from penstock.wire.ids import new_run_name

CONFIG_FILE = "config.toml"
LOCK_FILE = "launcher.lock"
TRACES = "traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; None: not said."""

    what: str | None = None
    run_dir: Path | None = None
    resume: bool = False
    allow_loss: bool = False
    actors: int | None = None
    ranks: int | None = None
    serve_at: str | None = None
    seed: int | None = None
    target_return: float | None = None
    total_steps: int | None = None
    redis: str | None = None
    assignments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can be started. `target`: mean return that counts as solved, None: there is none."""

    settings: Settings
    run_dir: Path
    resume: bool
    allow_loss: bool
    target: float | None

    @property
    def config(self) -> Path:
        """The run's configuration file."""
        return self.run_dir / CONFIG_FILE


def make_plan(request: Request) -> Plan:
    """Resolve a request; touches no file."""
    if request.resume:
        run_dir = _resumed_folder(request)
        settings = resolve(configuration.parse_toml(run_dir / CONFIG_FILE), request)
    else:
        settings = resolve(_first_layer(request.what), request)
        name = new_run_name(settings.run or settings.environment.id.rpartition(":")[2])
        sections = {"actor": _allowing_module(settings), "serving": _following_the_learner(settings)}
        settings = settings.model_copy(update={"run": name, **sections})
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
        target=known if target is None else target,
    )


def _following_the_learner(settings: Settings) -> ServingSection:
    """Clients of a run that learns from them stay on its newest weights, unless the user has said otherwise."""
    section = settings.serving
    if not section.listen or "activate_first" in section.model_fields_set:
        return section
    return section.model_copy(update={"activate_first": False})


def _check_actors(settings: Settings) -> None:
    if settings.actor.count == 0 and not settings.serving.listen:
        raise ConfigurationError(
            "actor.count=0: nobody would act; say --actors N, or --serve ADDRESS for clients that do"
        )
    if settings.actor.count == 0 and settings.algorithm.staleness == 0:
        raise ConfigurationError(
            "algorithm.staleness=0: lock-step waits for rollout workers, and actor.count=0 starts none; "
            "say --set algorithm.staleness=1"
        )


def resolve(first: Mapping[str, Any], request: Request) -> Settings:
    """Lay environment, flags and assignments over `first`, and all of it over the workload's defaults."""
    layers = [first, configuration.from_environment(), _flags(request)]
    layers += [configuration.parse_assignment(text) for text in request.assignments]
    return over_defaults(layers)


def over_defaults(layers: Sequence[Mapping[str, Any]]) -> Settings:
    """The layers over the workload's defaults for the environment that they name."""
    asked = configuration.load(layers)
    defaults = load(find(asked.workload).defaults)(asked.environment.id)
    return configuration.load([defaults, *layers])


def service_settings(
    config: Path | None, assignments: tuple[str, ...], secret: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of one service in the foreground: file, environment, `--set`, the secret of its Redis URL."""
    return configuration.load(_service_layers(config, assignments, secret))


def learner_settings(
    config: Path | None, assignments: tuple[str, ...], secret: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of a learner, who decides what all others do: as `service_settings`, over the defaults of `train`."""
    return over_defaults(_service_layers(config, assignments, secret))


def _service_layers(
    config: Path | None, assignments: tuple[str, ...], secret: Mapping[str, Any] | None
) -> list[Mapping[str, Any]]:
    file = [configuration.parse_toml(config)] if config else []
    said = [configuration.parse_assignment(text) for text in assignments]
    return [*file, configuration.from_environment(), *said, secret or {}]


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


def prepare_folder(plan: Plan) -> None:
    """Make the run's folder and its configuration file."""
    (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (plan.run_dir / "endpoints").mkdir(exist_ok=True)
    temporary = plan.config.with_suffix(".tmp")
    temporary.write_text(toml.dump(plan.settings))
    temporary.replace(plan.config)


def _allowing_module(settings: Settings) -> ActorSection:
    """The user named the environment's module here, so the actors that we start may import it."""
    module = settings.environment.id.rpartition(":")[0]
    if not module or module in settings.actor.allow_modules:
        return settings.actor
    return settings.actor.model_copy(update={"allow_modules": (*settings.actor.allow_modules, module)})


def _with_absolute_folders(settings: Settings, run_dir: Path) -> Settings:
    """Whoever reads the run's configuration later stands in another folder. Traces lie with the run."""
    sections: dict[str, Section] = {}
    if settings.actor.ack_journal is not None:
        journal = {"ack_journal": settings.actor.ack_journal.absolute()}
        sections["actor"] = settings.actor.model_copy(update=journal)
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
