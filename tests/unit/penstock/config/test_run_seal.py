"""The seal of a run's folder holds for this user, this place and these modules."""

import logging
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError, Settings, load
from penstock.config.trusted import SEAL_FILE, check_own, modules_of, seal

WITH_MODULE = {"actor": {"allow_modules": ["mine"]}}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, which is not there yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def made(folder: Path, settings: Settings) -> Path:
    """A sealed folder."""
    folder.mkdir()
    seal(folder, settings)
    return folder


def refused(folder: Path, settings: Settings) -> bool:
    """Whether the folder is foreign."""
    try:
        check_own(folder, settings, ())
    except ConfigurationError:
        return True
    return False


def test_what_was_made_here_is_ones_own(state: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", load([WITH_MODULE]))
    assert not refused(folder, load([WITH_MODULE]))
    key = state / "penstock" / "seal.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [file.name for file in key.parent.iterdir()] == [key.name]


@pytest.mark.promise("folder-made-here-module")
def test_other_modules_places_and_users_are_foreign(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load([WITH_MODULE])
    folder = made(tmp_path / "run", settings)
    assert refused(folder, load([{"actor": {"allow_modules": ["mine", "theirs"]}}]))
    assert refused(folder, load([WITH_MODULE, {"policy": {"network": "theirs:Net"}}]))
    moved = folder.rename(tmp_path / "moved")
    assert refused(moved, settings)
    folder = moved.rename(folder)
    assert not refused(folder, settings)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert refused(folder, settings)
    made(tmp_path / "another", settings)
    assert refused(folder, settings)
    (folder / SEAL_FILE).unlink()
    assert refused(folder, settings)


def test_what_the_user_allows_is_not_asked_for(state: Path, tmp_path: Path) -> None:
    check_own(tmp_path, load([WITH_MODULE]), ("mine", "other"))
    with pytest.raises(ConfigurationError, match=r"to be imported: mine; say --trust"):
        check_own(tmp_path, load([WITH_MODULE]), ("other",))


def test_a_run_without_modules_needs_no_seal(state: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", Settings())
    assert not refused(folder, Settings())
    assert list(folder.iterdir()) == []
    assert not state.exists()


def test_where_no_key_can_be_kept_the_folder_is_said_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        folder = made(tmp_path / "run", load([WITH_MODULE]))
    assert "will want --trust" in caplog.text
    assert refused(folder, load([WITH_MODULE]))


def test_the_modules_are_those_that_any_setting_has_imported() -> None:
    said = {
        "environment": {"id": "a:X-v0", "reward": [{"shape": "b:phi"}]},
        "policy": {"network": "c:Net"},
        "actor": {"allow_modules": ["d"], "places": {"reward": "e.f:score", "model": "/m", "x": "unix:/s"}},
    }
    assert modules_of(load([said])) == ("a", "b", "c", "d", "e.f")
