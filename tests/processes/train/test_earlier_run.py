"""A run folder that an earlier version wrote, `earlier_run`.

What it holds can still be read and gone on with.

It is of CartPole-v1 with a policy server beside it, from before the registry of versions and the canary had
sections of their own in the configuration. Its Redis, logs and addresses are left out.
"""

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from launch.cli.app import app
from launch.run.plan import make_plan, prepare_folder, take_configuration
from launch.run.request import Request
from launch.ui.catalogue import Catalogue
from learner.checkpoint.resume_options import ResumeOptions
from learner.checkpoint.store import CheckpointStore
from penstock.client import Arm, PolicyClient
from penstock.config.moved_keys import MOVED, with_new_keys
from penstock.config.service_settings import service_settings
from penstock.config.settings import ConfigurationError, load, parse_assignment, parse_toml
from penstock.registry.records import Origin
from penstock.registry.registry import Registry
from tests.support.run.learner_run import LearnerThread
from tests.support.run.serving_run import serving

WRITTEN: Final = Path(__file__).parent / "earlier_run"
RUN: Final = "cartpole-v1-10829c"
HELD: Final = set(with_new_keys(parse_toml(WRITTEN / "config.toml"))[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may write to."""
    return Path(shutil.copytree(WRITTEN, tmp_path / RUN))


def penstock(*words: str) -> Result:
    """The command line in this process."""
    reply = CliRunner().invoke(app, words)
    assert reply.exit_code == 0, reply.output
    return reply


def test_its_configuration_is_read_with_a_notice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a service too; what it set is where it belongs now, and one line names every key that has moved."""
    settings = service_settings(folder / "config.toml", ())
    assert (settings.canary.slow_ms, settings.serving.max_episodes) == (80.0, 500)
    assert (settings.registry.activate_first, settings.serving.policy) == (False, "default")
    (notice,) = [record.getMessage() for record in caplog.records if "earlier version" in record.getMessage()]
    assert len(HELD) >= 6
    assert all(f"{old} is now {MOVED[old]}" in notice for old in HELD)


def test_a_copy_of_its_configuration_is_refused_with_the_new_names(folder: Path, tmp_path: Path) -> None:
    """Given to another run it is no longer the run's own."""
    mine = tmp_path / "mine.toml"
    shutil.copy(folder / "config.toml", mine)
    with pytest.raises(ConfigurationError) as caught:
        make_plan(Request(what=str(mine), run_dir=tmp_path / "other"))
    assert {line.partition(":")[0] for line in str(caught.value).splitlines()} == HELD


def test_it_is_listed_and_its_versions_shown(folder: Path) -> None:
    """By the page's catalogue and `penstock policy`; its registry is migrated where that is needed."""
    run = Catalogue(folder.parent).runs()[0].facts()
    assert (run.name, run.state, run.environment, run.env_steps) == (RUN, "solved", "CartPole-v1", 20_217)
    with Registry.read(f"sqlite:///{folder / 'registry.sqlite'}") as registry:
        (version,) = registry.list("default")
    assert (version.version, version.origin) == (22, Origin.BEST)
    assert "mean return 500 over 5 episodes" in penstock("policy", "list", str(folder)).output


def test_its_policy_plays(folder: Path) -> None:
    """As well as it was evaluated."""
    reply = penstock("evaluate", str(folder), "--episodes", "1", "--json")
    assert json.loads(reply.stdout)["mean"] == 500.0


def test_it_is_served(folder: Path, tmp_path: Path) -> None:
    """By its one version, which was kept and never activated: the newest answers."""
    with serving(tmp_path, folder) as server, PolicyClient(server.address) as client:
        action = client.act(np.zeros(4, np.float32))
    assert (action.version, action.arm, action.fallback) == (22, Arm.LATEST, None)


def test_it_is_audited(folder: Path) -> None:
    """Without its Redis: what its checkpoint says of each fragment balances."""
    assert "40 trained" in penstock("audit", str(folder)).output


def test_it_is_gone_on_with(folder: Path, redis_url: str) -> None:
    """The learner takes its checkpoint up where it was; the configuration then has the keys of today."""
    written = (folder / "config.toml").read_bytes()
    plan = make_plan(Request(run_dir=folder, resumption=ResumeOptions(resume=True), total_steps=40_000))
    prepare_folder(plan)
    assert (folder / "config.toml").read_bytes() == written
    take_configuration(plan)
    assert load([parse_toml(folder / "config.toml")]) == plan.settings
    store = CheckpointStore(folder / "checkpoints", 2)
    (before,) = store.ids()
    with LearnerThread(redis_url, folder, plan.settings, resume=True) as learner:
        account = learner.drain()
    assert (account["env_steps"], account["updates"], account["policy_version"]) == (20_217, 20, 22)
    assert before in store.ids()


def test_a_setting_of_its_own_can_be_set_under_the_new_name_only(folder: Path) -> None:
    """`--set` lies over the translated file."""
    settings = service_settings(folder / "config.toml", ("canary.slow_ms=5",))
    assert settings.canary.slow_ms == 5.0
    with pytest.raises(
        ConfigurationError, match=r"serving\.canary_slow_ms: has moved, write canary\.slow_ms"
    ):
        load([parse_assignment("serving.canary_slow_ms=5")])
