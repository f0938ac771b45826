"""What pages and remedies say about installing brings this program, not another one of an index."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.config.configuration_error import DISTRIBUTION, how_to_install
from penstock.config.workload import find, load

if TYPE_CHECKING:
    from penstock.gateway.application import Service

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
ROOMS = (
    "actor",
    "benchmarks",
    "broker",
    "deploy",
    "examples",
    "learner",
    "penstock",
)
PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*Dockerfile")]
    if page.name != "CHANGELOG.md"
]
SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
COMMAND = re.compile(r"pip\s+install\s+((?:-\S+\s+)*)['\"]?((?:\.|penstock[\w-]*)(?:\[[^\]]*\])?)(?![\w/])")
REMEDY = re.compile(r"how_to_install\(['\"]([\w-]+)['\"]\)")


def ours(text: str) -> list[str]:
    """Requirements of the `pip install` commands in a text that name a checkout or a `penstock…`."""
    return [match[2] for match in COMMAND.finditer(text)]


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"].keys() == {"penstock"}
    own = re.findall(r"penstock[\w-]*(?=\[)", str(PROJECT["optional-dependencies"]))
    assert set(own) == {DISTRIBUTION}


@pytest.mark.parametrize("name", ["chat", "prompts"])
def test_what_a_site_begins_is_installed_with_it(name: str) -> None:
    pytest.importorskip("argon2", reason="the gateway needs its extra")
    site: Service = load(find(name).site)()
    found = SETUPTOOLS["packages"]["find"]["include"]
    folder = site.recipe.parent.relative_to(ROOT)
    assert any(fnmatch(".".join(folder.parts), pattern) for pattern in found)
    assert any(site.recipe.match(pattern) for pattern in SETUPTOOLS["package-data"]["*"])


def test_every_command_that_installs_brings_this_program() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {requirement}"
        for path in [*PAGES, *SOURCES]
        for requirement in ours(path.read_text())
        if requirement.partition("[")[0] not in {".", DISTRIBUTION}
    ]
    assert wrong == []


def test_pages_name_both_ways() -> None:
    for page in PAGES:
        found = ours(page.read_text())
        if any(requirement.startswith(DISTRIBUTION) for requirement in found):
            assert any(requirement.startswith(".") for requirement in found), page
    assert sum(len(ours(page.read_text())) for page in PAGES) > 8


def test_every_extra_that_is_named_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    named = {
        extra.strip()
        for path in PAGES
        for requirement in ours(path.read_text())
        for extra in requirement.partition("[")[2].rstrip("]").split(",")
        if extra and not extra.startswith("$")
    }
    named = {re.sub(r"\$\{.*", "", extra) for extra in named}
    remedies = {extra for path in SOURCES for extra in REMEDY.findall(path.read_text())}
    assert {"ui", "onnx", "rlhf", "postgresql"} <= remedies
    assert (named | remedies) - known == set()


@pytest.mark.parametrize("extra", ["ui", "rlhf"])
def test_a_remedy_says_both_ways(extra: str) -> None:
    assert ours(how_to_install(extra)) == [f".[{extra}]", f"{DISTRIBUTION}[{extra}]"]


LOADED = "import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
NOTHING = LOADED.format(module="sys")
IF_THERE = {"grpc_tools"}
"""What grpc loads where it is installed, and does without."""


def tops(code: str) -> set[str]:
    """Names of the packages that an interpreter has loaded after a program."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def required(names: Iterable[str]) -> set[str]:
    """Those distributions and all that they require themselves, extras aside."""
    found: set[str] = set()
    waiting = [canonicalize_name(Requirement(name).name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize(
    "module", ["penstock.launch.cli.app", "penstock.launch.inspection.status", "penstock.launch.control"]
)
def test_an_operator_needs_no_extra(module: str) -> None:
    of = packages_distributions()
    loaded = tops(LOADED.format(module=module)) - tops(NOTHING)
    there = required(PROJECT["dependencies"]) | {canonicalize_name(DISTRIBUTION)}
    brought = {top: {canonicalize_name(name) for name in of[top]} for top in loaded - IF_THERE if top in of}
    assert {top: names for top, names in brought.items() if not names & there} == {}
