import ast
import base64
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import tomli_w
from typer.testing import CliRunner

from penstock.config.service_settings import calling_security, service_settings
from penstock.config.settings import ConfigurationError
from penstock.launch.cli.app import app
from penstock.launch.commands.request import Request
from penstock.launch.run.plan import make_plan, prepare_folder, take_configuration
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.protocol.specification import RunSpecification
from tests.support.run.solved_run import SOLVED_RUN

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
    run = shutil.copytree(SOLVED_RUN, folder / "run")
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


OUTSIDE: Final = {
    "a database": ("registry", "url", "postgresql://me@theirs.example/d"),
    "a password": ("registry", "password_file", "/home/me/password"),
    "a token": ("security", "token_file", "/home/me/token"),
    "a password of Redis": ("security", "redis_password_file", "/home/me/password"),
    "headers": ("security", "http_headers_file", "/home/me/headers"),
    "a file of answers": ("serving", "shadow_record", "/home/me/.profile"),
    "a recording": ("learner", "record", "/home/me/recording"),
    "a journal": ("actor", "ack_journal", "/home/me/journal"),
}
"""What a configuration could have this user's commands write to, or tell."""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder that was not made here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return shutil.copytree(SOLVED_RUN, tmp_path / "run")


def name_in(run: Path, section: str, key: str, value: str) -> None:
    """Have the configuration of a run name that."""
    config = run / "config.toml"
    written = tomllib.loads(config.read_text())
    written.setdefault(section, {})[key] = value
    config.write_text(tomli_w.dumps(written))


@pytest.mark.promise("folder-made-here-module")
@pytest.mark.parametrize("named", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_a_foreign_folder_reads_nothing_outside_of_it(
    named: tuple[str, str, str], foreign: Path, tmp_path: Path
) -> None:
    name_in(foreign, *named)
    words = f"was not made here, and names places outside of it: {named[2]}; say --trust"
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        service_settings(None, (), foreign)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        make_plan(Request(what=str(foreign), resumption=ResumeOptions(resume=True)))
    assert service_settings(None, (), foreign, trust=True).run
    mine = tmp_path / "mine.toml"
    mine.write_text(tomli_w.dumps({named[0]: {named[1]: named[2]}}))
    assert service_settings(mine, (), foreign).run


def test_a_place_inside_a_foreign_folder_needs_no_trust(foreign: Path) -> None:
    name_in(foreign, "actor", "ack_journal", str(foreign / "journals"))
    assert service_settings(None, (), foreign).run


REFUSING: Final = {
    "policy list": (("policy", "list", "RUN"), OUTSIDE["a database"], "name the registry with --registry"),
    "policy promote": (
        ("policy", "promote", "RUN", "1", "--reason", "x"),
        ("registry", "url", "sqlite:////home/me/notes.sqlite"),
        "name the registry with --registry",
    ),
    "audit": (("audit", "RUN"), OUTSIDE["a password of Redis"], "name its Redis with --redis"),
}


@pytest.mark.promise("folder-made-here-module")
@pytest.mark.parametrize(("words", "named", "remedy"), REFUSING.values(), ids=REFUSING.keys())
def test_a_command_shows_a_foreign_folder_no_secret(
    words: tuple[str, ...], named: tuple[str, str, str], remedy: str, foreign: Path
) -> None:
    name_in(foreign, *named)
    name_in(foreign, "broker", "redis", "redis://theirs.example")
    reply = CliRunner().invoke(app, [word.replace("RUN", str(foreign)) for word in words])
    assert reply.exit_code == 2, reply.output
    assert named[2] in reply.stderr
    assert remedy in reply.stderr


def test_a_broker_named_by_a_foreign_folder_gets_no_token(foreign: Path, tmp_path: Path) -> None:
    name_in(foreign, *OUTSIDE["a token"])
    with pytest.raises(ConfigurationError, match="/home/me/token; name your own configuration with --config"):
        calling_security(foreign, None, ())
    mine = tmp_path / "mine.toml"
    mine.write_text('[security]\ntoken_file = "mine"\n')
    assert calling_security(foreign, mine, ()).token_file == Path("mine")


COMMANDS: Final = {
    "evaluate": ("evaluate", "run", "--episodes", "1"),
    "record": ("record", "run", "--out", "recorded", "--steps", "10"),
    "resume": ("train", "--resume", "run", "--print-config"),
}


@pytest.mark.promise("folder-made-here-module")
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_foreign_folder_requires_trust(words: tuple[str, ...], downloaded: Path) -> None:
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert f"was not made here, and names modules to be imported: {MODULE}; say --trust" in refused.stderr
    assert not (downloaded / "imported").exists()
    trusted = CliRunner().invoke(app, (*words, "--trust"))
    assert trusted.exit_code == 0, trusted.output
    assert (downloaded / "imported").exists() == (words[0] != "train")


def test_a_server_asks_until_the_run_was_resumed_with_trust(downloaded: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"names modules to be imported: {MODULE}; say --trust"):
        service_settings(None, (), downloaded / "run")
    assert service_settings(None, (), downloaded / "run", trust=True).actor.allow_modules == (MODULE,)
    said = (f'actor.allow_modules=["{MODULE}"]',)
    assert service_settings(None, said, downloaded / "run").actor.allow_modules == (MODULE,)
    resumed = Request(what="run", resumption=ResumeOptions(resume=True), trust=True)
    plan = make_plan(resumed)
    prepare_folder(plan)
    take_configuration(plan)
    assert make_plan(replace(resumed, trust=False)).settings.actor.allow_modules == (MODULE,)


ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("actor", "benchmarks", "broker", "learner", "penstock")
MODULES: Final = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
)
CALLS: Final = frozenset(
    {
        *("eval", "exec", "compile"),
        *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
        *("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
        *("os.system", "os.popen", "subprocess.getoutput", "multiprocessing.connection.Listener"),
    }
)
KEYWORDS: Final = frozenset({("shell", True), ("allow_pickle", True), ("weights_only", False)})


def unsafe(source: str) -> list[str]:
    """What of a source could run code that comes as data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in CALLS else []
            words = [(word.arg, getattr(word.value, "value", None)) for word in node.keywords]
            found += [f"{name}({key}={value})" for key, value in words if (key, value) in KEYWORDS]
    return found


def test_no_source_runs_code_that_comes_as_data_and_no_comment_lets_one_through() -> None:
    rules = ("TID251", "S102", "S301", "S302", "S307", "S506", "S602", "S605", "S614")
    sources = {path: path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert len(sources) > 100
    for path, source in sources.items():
        assert unsafe(source) == [], path
        excused = [line for line in source.splitlines() if "noqa" in line]
        assert not [line for line in excused if any(rule in line for rule in rules)], path


SAMPLES: Final = {
    "pickle": "import pickle\n",
    "pickle, from": "from pickle import loads\n",
    "cloudpickle": "import cloudpickle\n",
    "dill": "import dill\n",
    "marshal": "import marshal\n",
    "shelve": "import shelve\n",
    "joblib": "import joblib\n",
    "torch.load": 'import torch\n\ntorch.load("x")\n',
    "torch.save": 'import torch\n\ntorch.save({}, "x")\n',
    "numpy.load": 'import numpy as np\n\nnp.load("x")\n',
    "yaml.load": 'import yaml\n\nyaml.load("x")\n',
    "eval": 'eval("1")\n',
    "exec": 'exec("1")\n',
    "a shell": 'import subprocess\n\nsubprocess.run("ls", shell=True, check=True)\n',
    "os.system": 'import os\n\nos.system("ls")\n',
}


def test_the_test_and_the_lint_rule_find_each(tmp_path: Path) -> None:
    for index, sample in enumerate(SAMPLES.values()):
        assert unsafe(sample), sample
        (tmp_path / f"sample_{index}.py").write_text(sample)
    ruff = Path(sys.executable).with_name("ruff")
    select = ("--select", "TID251,S102,S301,S302,S307,S506,S602,S605", "--output-format", "concise")
    config = ("--no-cache", "--config", str(ROOT / "pyproject.toml"))
    command = [str(ruff), "check", *config, *select, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    missed = [what for index, what in enumerate(SAMPLES) if f"sample_{index}.py" not in done.stdout]
    assert (done.returncode, missed) == (1, []), done.stdout + done.stderr
