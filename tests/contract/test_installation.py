"""What pages and remedies say about installing brings this program, not another one of an index."""

import re
import tomllib
from pathlib import Path

import pytest

from penstock.config.extras import DISTRIBUTION, how_to_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = (
    "actor",
    "benchmarks",
    "broker",
    "deploy",
    "examples",
    "gateway",
    "launch",
    "learner",
    "penstock",
    "workloads",
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
    """Its extras name it by the same name; the command is another matter."""
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"].keys() == {"penstock"}
    own = re.findall(r"penstock[\w-]*(?=\[)", str(PROJECT["optional-dependencies"]))
    assert set(own) == {DISTRIBUTION}


def test_every_command_that_installs_brings_this_program() -> None:
    """A bare `pip install penstock` would bring somebody else's."""
    wrong = [
        f"{path.relative_to(ROOT)}: {requirement}"
        for path in [*PAGES, *SOURCES]
        for requirement in ours(path.read_text())
        if requirement.partition("[")[0] not in {".", DISTRIBUTION}
    ]
    assert wrong == []


def test_pages_name_both_ways() -> None:
    """Where a page names the distribution, it also says how to install from a checkout."""
    for page in PAGES:
        found = ours(page.read_text())
        if any(requirement.startswith(DISTRIBUTION) for requirement in found):
            assert any(requirement.startswith(".") for requirement in found), page
    assert sum(len(ours(page.read_text())) for page in PAGES) > 8


def test_every_extra_that_is_named_exists() -> None:
    """In pages as in remedies."""
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
    """From a checkout, and by the distribution's name."""
    assert ours(how_to_install(extra)) == [f".[{extra}]", f"{DISTRIBUTION}[{extra}]"]
