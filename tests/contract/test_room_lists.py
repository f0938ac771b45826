"""A package that lists its modules in its docstring lists all of them: a reader can trust the list."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("actor", "broker", "gateway", "launch", "learner", "penstock", "workloads")
WAY = (
    "actor/link",
    "actor/rollout",
    "broker/log",
    "broker/service",
    "learner/checkpoint",
    "learner/feed",
    "learner/process",
    "learner/publish",
)


def listed(package: Path) -> set[str]:
    """The names that begin the lines of the docstring's list, several separated by commas.

    A folder may end in "/".
    """
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    lines = re.findall(r"^ *([a-z_]\w*/?(?:, [a-z_]\w*/?)*)  +\S", text, flags=re.MULTILINE)
    return {name.rstrip("/") for line in lines for name in line.split(", ")}


def parts(package: Path) -> set[str]:
    """The modules and folders of a package; generated ones and what a browser gets are left out."""
    modules = {path.stem for path in package.glob("*.py") if path.stem != "__init__"}
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    return (modules | folders) - {"__pycache__", "static", "v1"}


PACKAGES = [init.parent for room in ROOMS for init in sorted((ROOT / room).rglob("__init__.py"))]
LISTS = [package for package in PACKAGES if parts(package) & listed(package)]


@pytest.mark.parametrize("package", LISTS, ids=lambda package: str(package.relative_to(ROOT)))
def test_a_list_of_modules_is_whole(package: Path) -> None:
    """A new file gets a line, and the line of one that is gone goes."""
    assert listed(package) == parts(package)


@pytest.mark.parametrize("package", WAY)
def test_the_rooms_on_the_way_of_a_fragment_list_their_modules(package: str) -> None:
    """In the order in which a reader meets them."""
    assert ROOT / package in LISTS
