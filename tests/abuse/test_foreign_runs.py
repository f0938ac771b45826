"""A run's folder that somebody else has made: what it names is imported when its user says so."""

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from launch.cli.app import app
from launch.run.plan import make_plan, prepare_folder, take_configuration
from launch.run.request import Request
from learner.checkpoint.resume_options import ResumeOptions
from penstock.config.service_settings import service_settings
from penstock.config.settings import ConfigurationError
from penstock.wire.specification import RunSpecification

EARLIER: Final = Path("tests/processes/train/earlier_run").absolute()
MODULE: Final = "somebodys_module"
CODE: Final = """
import pathlib
import gymnasium
pathlib.Path("imported").touch()
gymnasium.register("Theirs-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
"""


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run that names a module, and the module beside it; the user stands there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "download"
    run = shutil.copytree(EARLIER, folder / "run")
    (folder / f"{MODULE}.py").write_text(CODE)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("allow_modules = []", f'allow_modules = ["{MODULE}"]'))
    write_specification(run / "policies" / "policy.json")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop(MODULE, None)


def write_specification(file: Path) -> None:
    """Have the final policy be one of the environment that the module registers."""
    description = json.loads(file.read_text())
    asked = RunSpecification.decode(base64.b64decode(description["specification"]))
    environment = json.loads(asked.environment_json) | {"id": f"{MODULE}:Theirs-v0"}
    told = replace(asked, environment_json=json.dumps(environment)).encode()
    file.write_text(json.dumps(description | {"specification": base64.b64encode(told).decode()}))


COMMANDS: Final = {
    "evaluate": ("evaluate", "run", "--episodes", "1"),
    "record": ("record", "run", "--out", "recorded", "--steps", "10"),
    "resume": ("train", "--resume", "run", "--print-config"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_foreign_folder_asks_and_trust_answers(words: tuple[str, ...], downloaded: Path) -> None:
    """Refused with the modules that it names, and nothing of them has run; with --trust it goes on."""
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert f"was not made here, and names modules to be imported: {MODULE}; say --trust" in refused.stderr
    assert not (downloaded / "imported").exists()
    trusted = CliRunner().invoke(app, (*words, "--trust"))
    assert trusted.exit_code == 0, trusted.output
    assert (downloaded / "imported").exists() == (words[0] != "train")


def test_a_server_asks_too(downloaded: Path) -> None:
    """Its settings are those that the folder has."""
    with pytest.raises(ConfigurationError, match=f"names modules to be imported: {MODULE}; say --trust"):
        service_settings(None, (), downloaded / "run")
    assert service_settings(None, (), downloaded / "run", trust=True).actor.allow_modules == (MODULE,)
    said = (f'actor.allow_modules=["{MODULE}"]',)
    assert service_settings(None, said, downloaded / "run").actor.allow_modules == (MODULE,)


def test_a_run_that_was_resumed_with_trust_is_ones_own(downloaded: Path) -> None:
    """The launcher seals what it has gone on with: asked for once."""
    resumed = Request(what="run", resumption=ResumeOptions(resume=True), trust=True)
    plan = make_plan(resumed)
    prepare_folder(plan)
    take_configuration(plan)
    assert make_plan(replace(resumed, trust=False)).settings.actor.allow_modules == (MODULE,)
