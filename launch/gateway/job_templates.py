"""Templates of jobs: recipes for `penstock train`, each with a table that says what callers may choose.

    [template]
    title = "From feedback to a better model"
    kind = "feedback"                               # left out: a plain training

    [template.numbers.maxSteps]
    settings = {"learner.total_steps" = 1024}       # the setting is 1,024 times the number
    least = 1
    most = 100_000
    default = 1000
    whole = true

The name of a template is that of its file. A file is read anew when it has changed.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.jobs.job_records import Number, Template
from penstock.config.configuration_error import ConfigurationError
from penstock.training import lay_over

TABLE: Final = "template"


class _Number(BaseModel):
    model_config = ConfigDict(extra="forbid")

    settings: dict[Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z_]+)+$")], float] = Field(min_length=1)
    least: float
    most: float
    default: float
    whole: bool = False


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = ""
    kind: str = ""
    numbers: dict[str, _Number] = Field(default_factory=dict)


def read_templates(folder: Path) -> dict[str, Template]:
    """Return the templates of a folder by name; raises ConfigurationError for a file that is none."""
    return {file.stem: _template(file) for file in sorted(folder.glob("*.toml"))}


def recipe_of(file: Path) -> dict[str, Any]:
    """Return the configuration of a template, without its table; raises ConfigurationError."""
    content = _content(file)
    content.pop(TABLE, None)
    return content


def chosen_settings(template: Template, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings that the numbers of a job stand for, nested as in TOML."""
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        number = template.numbers[name]
        for setting, times in number.settings.items():
            one: Any = round(value * times) if number.whole else value * times
            for key in reversed(setting.split(".")):
                one = {key: one}
            lay_over(found, one)
    return found


def _template(file: Path) -> Template:
    content = _content(file)
    try:
        table = _Table.model_validate(content.get(TABLE, {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join((TABLE, *map(str, first["loc"])))
        raise ConfigurationError(f"{file}: {key}: {first['msg']}") from error
    return Template(
        name=file.stem,
        title=table.title or file.stem,
        kind=table.kind,
        numbers={name: Number(**one.model_dump()) for name, one in table.numbers.items()},
        model={
            "workload": content.get("workload", ""),
            "environment": content.get("environment", {}).get("id", ""),
            "algorithm": content.get("algorithm", {}).get("name", "ppo"),
            "policy": content.get("policy", {}).get("kwargs", {}),
        },
    )


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read as TOML: {error}") from error
