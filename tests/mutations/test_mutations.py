"""Every mutation still finds its piece of the source, and the tests that shall notice it exist."""

import re
from pathlib import Path

import pytest

from tests.mutations.campaign import ROOT, Mutation, apply, read_table


@pytest.mark.parametrize("mutation", read_table(), ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_code_it_names(mutation: Mutation, tmp_path: Path) -> None:
    files = {edit.file for edit in mutation.edits}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    apply(mutation, tmp_path)
    assert all((tmp_path / file).read_text() != (ROOT / file).read_text() for file in files)


@pytest.mark.parametrize("mutation", read_table(), ids=lambda mutation: mutation.name)
def test_the_tests_of_a_mutation_exist(mutation: Mutation) -> None:
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_every_row_under_fire_can_be_seen_to_fail() -> None:
    _, _, fire = (ROOT / "docs" / "guarantees.md").read_text().partition("\n## Under fire\n")
    guards = {test for mutation in read_table() for test in mutation.tests}
    named = set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", fire))
    assert named
    assert {test for test in named if not {test, test.partition("::")[0]} & guards} == set()
