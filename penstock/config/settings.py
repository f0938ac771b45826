"""The configuration: TOML, then `PENSTOCK_SECTION__KEY`, then `--set`; unknown keys are errors.

Sections of other modules are imported from here.
"""

import errno
import math
import os
import statistics
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Self

import tomli_w
from pydantic import Field, ValidationError

from penstock.config.algorithm_sections import (
    UNKNOWN,
    AlgorithmSection,
    AnyAlgorithm,
    CloneSection,
    DQNSection,
    ImpalaSection,
    OnPolicySection,
    PPOSection,
    RandomSection,
    ReinforceSection,
    ReplaySection,
    SACSection,
    algorithm_name,
)
from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import NoPlainFile, is_guarded, read_whole
from penstock.config.sections import (
    ActorSection,
    AtariSection,
    BrokerSection,
    CanarySection,
    EnvironmentSection,
    EvaluationSection,
    LearnerSection,
    LogsSection,
    MetricsSection,
    PolicySection,
    RegistrySection,
    Section,
    SecuritySection,
    ServingSection,
)
from penstock.config.url_secrets import remedy, secret_in, without_secret
from penstock.config.workload import default_workload

# ---- Checks of every value, before any section validates it.

_SHOWN: Final = 80
_MOST: Final = 2**63 - 1
_MOST_CHARACTERS: Final = 256 * 1024
_MOST_DOTS: Final = 512


def check_values(layer: Mapping[str, Any]) -> None:
    """Raise ConfigurationError that names the first impossible value; a secret is not repeated."""
    for key, value in _leaves("", layer):
        if isinstance(value, str):
            _check_text(key, value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{key}={value}: no finite number; write one")
        elif isinstance(value, int) and abs(value) > _MOST:
            raise ConfigurationError(f"{key}={value}: TOML has no number beyond 64 bits; write a smaller one")
        elif hasattr(value, "isoformat"):
            raise ConfigurationError(f"{key}={value}: a date is no setting; write it in quotes, as text")


def _check_text(key: str, text: str) -> None:
    where = secret_in(text)
    if where is not None:
        raise ConfigurationError(
            f"{key}={without_secret(text)}: holds a secret in {where}, which files and messages would show; "
            f"{remedy(text)}"
        )
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigurationError(f"{key}={text[:_SHOWN]!r}: is not valid text; write it in UTF-8")


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value with its key, and every name in a table as a value of the table."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield key or str(name), name
            yield from _leaves(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(key, inner)
    else:
        yield key, value


ENVIRONMENT_PREFIX = "PENSTOCK_"
_REPLACED = "kwargs"
"""A table that a later layer replaces as a whole, since its arguments belong together."""
_SECRETS = ("security.redis_password", "registry.url")


class Settings(Section):
    """The whole configuration of a run."""

    run: str = ""
    """Name of the run; empty: `penstock train` makes one from the environment and a random suffix.

    A learner without `penstock train` needs one.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run."""
    workload: str = Field(default_factory=default_workload)
    """Installed workload; by default the one that is registered as the default."""
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
    try:
        return tomllib.loads(_text_of_others(path) if is_guarded(path) else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give a TOML file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 ({error.reason}); save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: nested too deeply to be read; use fewer levels") from error


def _text_of_others(path: Path) -> str:
    """Return the text of a file that others can write; raises NoPlainFile if parsing would take long."""
    text = read_whole(path).decode()
    # A key of n parts takes tomllib n * n steps.
    if len(text) > _MOST_CHARACTERS or any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
        why = f"has more than {_MOST_CHARACTERS:,} characters, or {_MOST_DOTS} dots in a line"
        raise NoPlainFile(errno.EFBIG, path, why)
    return text


class _Some(dict[str, Any]):
    """Single arguments that are merged into a table that is otherwise replaced as a whole."""


def parse_assignment(text: str) -> dict[str, Any]:
    """Return `section.key=value` as nested dictionaries; the value is TOML where it parses, else a string."""
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
    merged: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            merged = merge(merged, parse_assignment(f"{key}={value}"))
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
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


# ---- Settings as TOML text: `config.toml`, from which every service starts, without unset and secret values.


def dump(settings: Settings) -> str:
    """Return all settings except unset and secret ones; `load([parse_toml(...)])` reads them back."""
    return _toml(_plain(settings))


def shown(settings: Settings, *, advanced: bool) -> str:
    """Return the settings for `--print-config`, as TOML; secrets are masked."""
    content = _plain(settings)
    if settings.security.redis_password is not None:
        content["security"]["redis_password"] = "**********"  # noqa: S105 - stars
    if advanced:
        return _toml(content)
    hidden = _hide_advanced(settings, content)
    note = f"# {hidden} advanced settings stand at their defaults; --advanced shows them."
    return f"{_toml(content)}\n{note}\n"


def _plain(settings: Settings) -> dict[str, Any]:
    content = settings.model_dump(mode="json", exclude_none=True)
    content["security"].pop("redis_password", None)
    return content


def _toml(content: Mapping[str, Any]) -> str:
    """Return TOML; escapes DEL, a control character that TOML forbids and `tomli_w` does not escape."""
    return tomli_w.dumps(content).replace("\x7f", "\\u007F")


def _hide_advanced(section: Section, content: dict[str, Any]) -> int:
    """Remove advanced settings at their defaults from `content`; returns their number."""
    hidden = 0
    for name, known in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            hidden += _hide_advanced(value, content[name])
        elif section.is_advanced(name) and value == known.default:
            content.pop(name, None)
            hidden += 1
    return hidden


# ---- Arguments and results of a workload's preparation of a run and its rehearsal.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Statistics of scores. mean, std: None without scores; std: of the population."""

    count: int
    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(count=0, mean=None, std=None)
        return cls(count=len(values), mean=statistics.fmean(values), std=statistics.pstdev(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result of a short preparation.

    settings: they name what was prepared, which suffices for a trial run. more_seconds: by which the full
    preparation takes longer. scores: of the data that was used.
    """

    settings: Settings
    more_seconds: float = 0.0
    scores: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a long preparation. say: prints a line. stop: set when it must end early, with Interrupted."""

    say: Callable[[str], None]
    stop: threading.Event
