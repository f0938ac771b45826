"""The injectors of a project: folders below `STATE/injectors/PROJECT` of the gateway's machine.

An injector is shown where its `--folder` lies there. Names come over the network: they are looked up among
the folders that are there, and never become a path.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.workloads.goals.injector.injection_journal import INJECTIONS

INJECTORS: Final = "injectors"


class NoSuchInjector(Exception):
    """There is no injector of that name in the project."""


def injector_folders(state: Path, project: str) -> Mapping[str, Path]:
    """Return the folders of a project's injectors by name, sorted. state: the gateway's folder."""
    projects = _folders(state / INJECTORS)
    found = _folders(projects[project]) if project in projects else {}
    return {name: folder for name, folder in sorted(found.items()) if (folder / INJECTIONS).is_file()}


def injector_folder(state: Path, project: str, name: str) -> Path:
    """Return the folder of one injector; raises NoSuchInjector."""
    try:
        return injector_folders(state, project)[name]
    except KeyError as error:
        raise NoSuchInjector(
            f"this project has no such injector: start one with --folder STATE/{INJECTORS}/PROJECT/NAME"
        ) from error


def _folders(place: Path) -> dict[str, Path]:
    try:
        return {one.name: one for one in place.iterdir() if one.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
