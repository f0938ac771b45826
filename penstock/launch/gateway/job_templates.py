"""Templates of jobs: recipes for `penstock train`, each with a table that says what callers may choose.

`penstock/recipes/service` has some. The name of a template is that of its file. Files are read again each
time; while one is wrong, as a half-written one is, its last right content is used, so that no other template
and no job suffers.
"""

import copy
import logging
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.jobs.job_records import Number, Template
from penstock.training import lay_over

TABLE: Final = "template"

log = logging.getLogger(__name__)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = ""
    kind: str = ""
    numbers: dict[str, Number] = Field(default_factory=dict)


class TemplateFolder:
    """The templates of a folder. Raises ConfigurationError for a wrong file when this is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = read_templates(folder)
        self._reported = dict[str, str]()

    def templates(self) -> dict[str, Template]:
        """Return the templates by name, each as of its file when that was last right."""
        found = dict[str, Template]()
        for file in _files(self._folder):
            try:
                found[file.stem] = _read(file)
                self._reported.pop(file.stem, None)
            except ConfigurationError as error:
                if (known := self._known.get(file.stem)) is not None:
                    found[file.stem] = known
                if self._reported.get(file.stem) != str(error):
                    self._reported[file.stem] = str(error)
                    log.warning(
                        "a template is wrong: its last right content is used", extra={"error": str(error)}
                    )
        self._known = found
        return found


def read_templates(folder: Path) -> dict[str, Template]:
    """Return the templates of a folder by name; raises ConfigurationError for a wrong file."""
    return {file.stem: _read(file) for file in _files(folder)}


def check_templates(folder: Path, kinds: Collection[str]) -> None:
    """Raise ConfigurationError for a wrong file, or one of a kind that is not installed."""
    for one in read_templates(folder).values():
        if one.kind not in {"", *kinds}:
            known = ", ".join(sorted(kinds)) or "none"
            raise ConfigurationError(
                f"{folder / one.name}.toml: template.kind={one.kind!r}: leave it out, or use one of: {known}"
            )


def configured(template: Template, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the recipe of a template with the settings that the numbers of a job stand for."""
    recipe: dict[str, Any] = copy.deepcopy(dict(template.recipe))
    for name, value in numbers.items():
        number = template.numbers[name]
        for setting, times in number.settings.items():
            one: Any = round(value * times) if number.whole else value * times
            for key in reversed(setting.split(".")):
                one = {key: one}
            lay_over(recipe, one)
    return recipe


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


def _read(file: Path) -> Template:
    content = _content(file)
    try:
        table = _Table.model_validate(content.pop(TABLE, {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join((TABLE, *map(str, first["loc"])))
        raise ConfigurationError(f"{file}: {key}: {first['msg']}") from error
    return Template(
        name=file.stem,
        title=table.title or file.stem,
        kind=table.kind,
        numbers=table.numbers,
        model={
            "workload": content.get("workload", ""),
            "environment": _section(file, content, "environment").get("id", ""),
            "algorithm": _section(file, content, "algorithm").get("name", "ppo"),
            "policy": _section(file, content, "policy").get("kwargs", {}),
        },
        recipe=content,
    )


def _section(file: Path, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise ConfigurationError(f"{file}: {name}: write a table, as [{name}]")
    return found


def _content(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigurationError(f"{file}: is no file: take it out of the folder of templates")
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read as TOML: {error}") from error
