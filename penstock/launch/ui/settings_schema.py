"""The JSON schema of a run's settings, with their lines of help, and with the section of every algorithm."""

import ast
import functools
import inspect
import textwrap
from typing import Any, Final

from penstock.config.plugin_sections import algorithm_sections
from penstock.config.sections.algorithms import SECTIONS
from penstock.config.sections.section import Section
from penstock.config.settings import Settings

ALGORITHMS: Final = "algorithms"
"""Key of the schema under which those of `algorithm` lie, by `algorithm.name`."""


@functools.cache
def settings_schema() -> dict[str, Any]:
    """Return the schema: an object of sections; raises ConfigurationError for a workload's that is none."""
    schema = _described(Settings)
    schema[ALGORITHMS] = {
        name: _described(kind) for name, kind in {**SECTIONS, **algorithm_sections()}.items()
    }
    return schema


def _described(kind: type[Section]) -> dict[str, Any]:
    """Return the schema of a section, references resolved, each property with its help and its place."""
    schema = kind.model_json_schema()
    for name, field in kind.model_fields.items():
        shown = schema["properties"][name]
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section) and name != "algorithm":
            shown = schema["properties"][name] = _described(inner)
        shown["description"] = _help(kind).get(name) or shown.get("description", "")
        shown["advanced"] = kind.is_advanced(name)
    return schema


@functools.cache
def _help(kind: type[Section]) -> dict[str, str]:
    """Return the line below each field of a section and of those that it is made from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, Section) and one is not Section:
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, line in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = _text(line)
    return found


def _text(line: ast.stmt) -> str:
    if not isinstance(line, ast.Expr) or not isinstance(line.value, ast.Constant):
        return ""
    return inspect.cleandoc(str(line.value.value)).replace("\n", " ")
