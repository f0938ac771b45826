"""The Dockerfiles as stages of instructions, and an image's build stage carried out in a folder."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dockerfile_parse import DockerfileParser

from tests.deploy.manifests import ROOT

FOLDER: Final = ROOT / "deploy" / "docker"
NAMES: Final = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.Dockerfile"))
VENV: Final = "/opt/penstock"
"""Where the images have their programs."""


@dataclass(slots=True)
class Stage:
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value for kind, value in self.instructions if kind == name]


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.Dockerfile"


def stages(name: str) -> list[Stage]:
    found: list[Stage] = []
    # Given the content, the parser writes no file of its own.
    parser = DockerfileParser(fileobj=path_of(name).open("rb"), env_replace=False)
    for step in parser.structure:
        kind, value = step["instruction"], step["value"]
        if kind == "FROM":
            found.append(Stage(base=value))
        elif found:
            found[-1].instructions.append((kind, value))
    return found


class Built:
    """An image's build stage, done in `folder` with the instructions' own commands.

    /opt/penstock lies in it.
    """

    def __init__(self, name: str, folder: Path, arguments: dict[str, str]) -> None:
        self.name = name
        self.venv = folder / "penstock"
        self._context = folder / "build"
        self._context.mkdir()
        build, self._final = stages(name)
        defaults = dict(one.partition("=")[::2] for one in build.values("ARG"))
        given = {key: value.strip('"') for key, value in defaults.items()} | arguments
        for kind, value in build.instructions:
            if kind == "COPY":
                self._copy(value)
            elif kind == "RUN":
                self._run(value, given)

    def _copy(self, value: str) -> None:
        *sources, target = value.split()
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(path, self._context / target, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(path, self._context / target)

    def _run(self, command: str, arguments: dict[str, str]) -> None:
        tools = self._context.parent / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
        environment = {**os.environ, **arguments, "PATH": f"{tools}:/usr/bin:/bin"}
        environment.pop("VIRTUAL_ENV", None)
        done = subprocess.run(
            ["sh", "-c", command.replace(VENV, str(self.venv))],
            cwd=self._context,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    @property
    def environment(self) -> dict[str, str]:
        (text,) = self._final.values("ENV")
        pairs = dict(word.partition("=")[::2] for word in text.split())
        pairs["PATH"] = pairs["PATH"].replace(VENV, str(self.venv)).replace("$PATH", "/usr/bin:/bin")
        return pairs

    @property
    def entry_point(self) -> list[str]:
        (text,) = self._final.values("ENTRYPOINT")
        (program,) = text.strip("[]").replace('"', "").split(",")
        found = shutil.which(program, path=self.environment["PATH"])
        assert found == str(self.venv / "bin" / program)
        return [found]

    @property
    def default_words(self) -> list[str]:
        (text,) = self._final.values("CMD")
        return [word.strip() for word in text.strip("[]").replace('"', "").split(",")]

    def imports(self, module: str) -> bool:
        words = [str(self.venv / "bin" / "python"), "-c", f"import {module}"]
        return (
            subprocess.run(words, check=False, capture_output=True, env=self.environment, cwd="/").returncode
            == 0
        )
