"""The one configuration model: TOML, then environment, then `--set`; unknown keys are errors.

Every setting has a line of help and, where it has one, a unit. Environment variables are
`PENSTOCK_SECTION__KEY`. Values that are None are chosen by the workload's defaults or the machine.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.config.plain_values import check_values
from penstock.config.plugins import default_workload
from penstock.config.run_files import is_guarded, read_whole
from penstock.config.sections.actor import ActorSection
from penstock.config.sections.algorithm_section import AlgorithmSection
from penstock.config.sections.algorithms import (
    UNKNOWN,
    AnyAlgorithm,
    CloneSection,
    ImpalaSection,
    PPOSection,
    RandomSection,
    ReinforceSection,
    algorithm_name,
)
from penstock.config.sections.broker import BrokerSection
from penstock.config.sections.canary import CanarySection
from penstock.config.sections.environment import AtariSection, EnvironmentSection
from penstock.config.sections.learner import EvaluationSection, LearnerSection
from penstock.config.sections.observability import LogsSection, MetricsSection
from penstock.config.sections.on_policy import OnPolicySection
from penstock.config.sections.policy_section import PolicySection
from penstock.config.sections.registry_section import RegistrySection
from penstock.config.sections.replay import DQNSection, ReplaySection, SACSection
from penstock.config.sections.section import Section
from penstock.config.sections.security import SecuritySection
from penstock.config.sections.serving import ServingSection

__all__ = [
    "ENVIRONMENT_PREFIX",
    "ActorSection",
    "AlgorithmSection",
    "AtariSection",
    "BrokerSection",
    "CanarySection",
    "CloneSection",
    "ConfigurationError",
    "DQNSection",
    "EnvironmentSection",
    "EvaluationSection",
    "ImpalaSection",
    "LearnerSection",
    "LogsSection",
    "MetricsSection",
    "OnPolicySection",
    "PPOSection",
    "PolicySection",
    "RandomSection",
    "RegistrySection",
    "ReinforceSection",
    "ReplaySection",
    "SACSection",
    "Section",
    "SecuritySection",
    "ServingSection",
    "Settings",
    "from_environment",
    "load",
    "merge",
    "parse_assignment",
    "parse_toml",
]

ENVIRONMENT_PREFIX = "PENSTOCK_"
_REPLACED = "kwargs"
"""A table that is replaced as a whole, since its arguments belong together."""
_SECRETS = ("security.redis_password", "registry.url")


class Settings(Section):
    """The whole configuration of a run."""

    run: str = ""
    """Name of the run; empty: `penstock train` makes one from the environment and a random suffix.

    A learner on its own must be given one.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run."""
    workload: str = Field(default_factory=default_workload)
    """Installed workload; left out, the one that is registered as the default."""
    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    algorithm: AnyAlgorithm = PPOSection()
    actor: ActorSection = ActorSection()
    broker: BrokerSection = BrokerSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    registry: RegistrySection = RegistrySection()
    canary: CanarySection = CanarySection()
    serving: ServingSection = ServingSection()
    security: SecuritySection = SecuritySection()
    metrics: MetricsSection = MetricsSection()
    logs: LogsSection = LogsSection()


def parse_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raises ConfigurationError that names file and line."""
    try:
        return tomllib.loads(
            read_whole(path).decode() if is_guarded(path) else path.read_text(encoding="utf-8")
        )
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give a TOML file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 ({error.reason}); save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: nested too deeply to be read; write it flatter") from error


class _Some(dict[str, Any]):
    """Some of the arguments of a table that is else replaced as a whole."""


def parse_assignment(text: str) -> dict[str, Any]:
    """Return `section.key=value` as nested dictionaries; the value is TOML where it parses, else a string.

    Raises ConfigurationError for a text without "=" or without a key.

    A secret is a string, whatever it looks like. A key inside `kwargs` changes that one of them.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"--set {text!r}: write section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if key in _SECRETS and not isinstance(parsed, str):
        parsed = value
    parts = key.split(".")
    for index in reversed(range(len(parts))):
        inside = index and parts[index - 1] == _REPLACED
        parsed = _Some({parts[index]: parsed}) if inside else {parts[index]: parsed}
    return dict(parsed)


def from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return every `PENSTOCK_SECTION__KEY=value` as nested dictionaries."""
    merged: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            merged = merge(merged, parse_assignment(f"{key}={value}"))
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`, section by section, and return the result.

    A table `kwargs` replaces the one below it, whose arguments are those of something else; single ones of an
    assignment are laid on it.
    """
    result: dict[str, Any] = _Some(base) if isinstance(base, _Some) else dict(base)
    for key, value in over.items():
        inner = result.get(key)
        if (
            isinstance(inner, Mapping)
            and isinstance(value, Mapping)
            and (key != _REPLACED or isinstance(value, _Some))
        ):
            result[key] = merge(inner, value)
        else:
            result[key] = value
    return result


def load(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """Validate the layers laid on one another, first to last.

    Raises ConfigurationError with a line per mistake: key, value and what is allowed; for a URL that holds a
    secret it names the file to put it in.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    check_values(merged)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(dict(e), merged) for e in error.errors())) from error


def _explain(error: dict[str, Any], merged: Mapping[str, Any]) -> str:
    place, chosen = [str(part) for part in error["loc"]], ""
    if place[0] == "algorithm" and len(place) > 1:
        chosen = f" of algorithm.name={algorithm_name(merged['algorithm'])!r}"
    key = ".".join(place)
    match error["type"]:
        case "extra_forbidden":
            return (
                f"{key}: unknown key; `penstock train --print-config --advanced` lists the known ones{chosen}"
            )
        case known if known == UNKNOWN:
            return f"{key}.name={error['ctx']['name']!r}: {error['msg']}"
        case _:
            shown = "**********" if key in _SECRETS else repr(error["input"])
            return f"{key}={shown}: {error['msg']}"
