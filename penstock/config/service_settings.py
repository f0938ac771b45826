"""Resolved settings of one process: a service in the foreground, or a command that looks at a run's folder.

Layers, each over the one before: the workload's defaults for a learner, the TOML file, the process
environment, `--set`. Every mistake is a ConfigurationError that names the key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.config import settings as configuration
from penstock.config.run_folder import CONFIG_FILE, is_guarded
from penstock.config.settings import SecuritySection, Settings
from penstock.config.trusted import check_own, check_places, places_beyond, places_of
from penstock.config.workload import find, load

_OF_A_SERVER: Final = ("serving", "registry", "canary")
"""Sections that a policy server takes from the configuration of the run that it serves."""


def service_settings(
    config: Path | None, assignments: tuple[str, ...], run_dir: Path | None = None, *, trust: bool = False
) -> Settings:
    """Return the settings of a service, from layers: the run that it serves, file, environment, `--set`.

    trust: accept a run's folder that was not made by this user.
    """
    layers = _service_layers(config, assignments)
    written = {} if run_dir is None else _written(run_dir, layers, trust=trust)
    if written:
        local = configuration.load([written])
        served: dict[str, Any] = {name: written[name] for name in _OF_A_SERVER if name in written}
        actor = {"allow_modules": local.actor.allow_modules, "places": places_of(local)}
        layers.insert(0, {"run": local.run, "actor": actor, **served})
    return configuration.load(layers)


def learner_settings(config: Path | None, assignments: tuple[str, ...]) -> Settings:
    return over_defaults(_service_layers(config, assignments))


def local_settings(run_dir: Path, assignments: tuple[str, ...] = (), *, trust: bool = False) -> Settings:
    """Return the settings in a run's folder; a folder that was not made by this user needs `trust`."""
    assigned = [configuration.parse_assignment(one) for one in assignments]
    settings = configuration.load([_written(run_dir, assigned, trust=trust), *assigned])
    actor = settings.actor.model_copy(update={"places": places_of(settings)})
    return settings.model_copy(update={"actor": actor})


def calling_security(run_dir: Path, config: Path | None, assignments: tuple[str, ...]) -> SecuritySection:
    """Return section `security` for calls to a run's broker, from `config` or else the run's folder."""
    file = config or run_dir / CONFIG_FILE
    section = service_settings(file if file.exists() else None, assignments).security
    if config is None and is_guarded(file):
        return SecuritySection(
            insecure=section.insecure
        )  # others can write there, so no file that it names is read
    if config is None and section.token_file is not None and file.exists():
        own = configuration.load([configuration.parse_toml(file)])
        check_places(run_dir, own, "name your own configuration with --config")
    return section


def over_defaults(layers: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of layers over the workload's defaults for their environment and algorithm."""
    named = configuration.load(layers)
    defaults = load(find(named.workload).defaults)(named.environment.id, named.algorithm.name)
    return configuration.load([defaults, *layers])


def origin_of_defaults(settings: Settings) -> str:
    """Return in words whether the workload has settings for this environment, or takes general ones."""
    defaults, name = load(find(settings.workload).defaults), settings.algorithm.name
    environment_id = settings.environment.id
    if defaults(environment_id, name) != defaults("", name):
        return f"defaults: those shipped for {environment_id}; --print-config shows them"
    return "defaults: the workload's general ones; --print-config shows them"


def _written(run_dir: Path, layers: Sequence[Mapping[str, Any]], *, trust: bool) -> dict[str, Any]:
    config = run_dir / CONFIG_FILE
    if not config.exists():
        return {}
    written = configuration.parse_toml(config)
    if not trust:
        user = configuration.load(layers)
        check_own(
            run_dir,
            configuration.load([written]),
            user.actor.allow_modules,
            allowed_places=places_beyond(run_dir, user),
        )
    return written


def _service_layers(config: Path | None, assignments: tuple[str, ...]) -> list[Mapping[str, Any]]:
    file = [configuration.parse_toml(config)] if config else []
    assigned = [configuration.parse_assignment(text) for text in assignments]
    return [*file, configuration.from_environment(), *assigned]
