"""The place of jobs has one name, which a loss of power does not take."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.gateway.local_runner import JobFolders


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A folder of templates, with none in it."""
    made = tmp_path / "templates"
    made.mkdir()
    return made


def test_the_name_of_a_place_is_on_the_disk_before_it_is_used(
    tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        size = "" if synced.is_dir() else f" of {synced.stat().st_size}"
        happened.append(f"{'a file' if size else synced.name}{size}")
        sync(descriptor)

    def linked(own: Any, target: Any) -> None:
        happened.append(f"is called {Path(target).name}")
        link(own, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", linked)
    place = JobFolders(tmp_path / "state" / "jobs", templates).place
    assert happened == [f"a file of {len(place)}", "is called place", "jobs", "state"]


def test_gateways_that_begin_together_have_one_place(tmp_path: Path, templates: Path) -> None:
    jobs = tmp_path / "jobs"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: JobFolders(jobs, templates).place, range(8)))
    assert len(found) == 1
    assert all(found)
    assert [path.name for path in jobs.iterdir()] == ["place"]
