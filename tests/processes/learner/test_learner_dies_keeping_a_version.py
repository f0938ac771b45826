"""The learner dies while it keeps a version, between the file and the row of the registry."""

from pathlib import Path
from typing import Final

import pytest

from penstock.registry.registry import Registry
from penstock.registry.weight_files import kept_files, read_kept, registry_url
from tests.processes.learner.test_learner_fail_points import die_at
from tests.support.fleet.fleet import Fleet, Shape
from tests.support.fleet.learner_books import Versions, View

SHAPE: Final = Shape(actors=2, brokers=1, settings=("learner.keep_every_updates=2",))
RULES: Final = ("keep.writing=kill@2", "keep.registering=kill@2")
POLICY: Final = "default"


def rows(run_dir: Path) -> set[int]:
    """Versions that are registered; the file of each that is kept is whole."""
    registry = Registry.open(registry_url(run_dir))
    try:
        for one in registry.pinned(POLICY):
            assert len(read_kept(run_dir, one.version, one.sha256)) == one.size_bytes
        return {one.version for one in registry.list(POLICY)}
    finally:
        registry.close()


@pytest.mark.promise("learner-dies-file-version")
@pytest.mark.timeout(600)
def test_a_learner_that_dies_between_file_and_row_registers_nothing_by_halves(tmp_path: Path) -> None:
    versions, registered, deaths = Versions(), set[int](), 0
    with Fleet(tmp_path, SHAPE) as fleet, View(fleet.redis_url) as view:
        for name in fleet.members:
            if name != "learner":
                fleet.start(name)
        fleet.wait(lambda: fleet.serves("redis"), "Redis")
        for rule in RULES:
            die_at(fleet, rule, versions, view)
            found = rows(tmp_path)
            assert registered <= found
            registered = found
            deaths += rule.startswith("keep.registering")
            assert len(kept_files(tmp_path) - found) <= deaths
        fleet.start("learner")
        fleet.wait(lambda: max(rows(tmp_path)) > max(registered), "the next version that is kept")
        audit = fleet.finish()
    assert kept_files(tmp_path) - rows(tmp_path), "no death left a file without a row"
    assert audit.code == 0, audit.text
