"""The tables of docs/guarantees.md: each promise of promises.toml beside the tests that are marked with it.

    python -m tests.promises

A test names what it shows with `@pytest.mark.promise(KEY, …)`.
"""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "guarantees.md"
_TABLE: Final = re.compile(r"(<!-- promises: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def read_promises() -> dict[str, dict[str, str]]:
    """Return the sentence of each promise by section and key."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def read_marks() -> dict[str, list[str]]:
    """Return the tests that show each promise, as FILE::NAME, by key."""
    marks = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "mark.promise(" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for key in _keys(node):
                    marks[key].append(f"{file.relative_to(ROOT)}::{node.name}")
    return marks


def _keys(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [
        ast.literal_eval(argument)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise"
        for argument in mark.args
    ]


def render() -> str:
    """Return the page with its tables made anew."""
    promises, marks = read_promises(), read_marks()

    def table(match: re.Match[str]) -> str:
        rows = []
        for key, sentence in promises[match[2]].items():
            cells = [sentence.replace("|", r"\|"), ", ".join(f"`{test}`" for test in marks[key])]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join([match[1].rstrip(), "| promise | shown by |", "|---|---|", *rows, match[3]])

    return _TABLE.sub(table, PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(render())
