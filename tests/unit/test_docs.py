import re
from pathlib import Path

import pytest

from penstock.wire.refusal import Reason

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files that pages link to exist."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    """A path of the source in a page is a path in the tree."""
    folders = "actor|benchmarks|broker|deploy|docs|launch|learner|penstock|protos|tests|workloads"
    paths = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_promise_names_a_test_that_exists() -> None:
    """docs/guarantees.md claims nothing that no test shows."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_is_explained(reason: Reason) -> None:
    """docs/operations.md has a row for each: what it means, what to do."""
    assert f"\n| `{reason.name}` | " in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(
    "target",
    ["train", "test", "test-slow", "soak", "mutations", "learn", "staleness", "check", "bench", "protos"],
)
def test_every_make_target_is_in_the_pages(target: str) -> None:
    """Who reads README or CONTRIBUTING knows what make can do."""
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    assert any(f"make {target}" in page.read_text() for page in PAGES)
