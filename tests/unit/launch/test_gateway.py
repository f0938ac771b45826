import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import requests
from typer.testing import CliRunner, Result

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Settings
from penstock.gateway.accounts.oidc import read_provider
from penstock.gateway.jobs.job_records import Action, CannotSteer, Order
from penstock.gateway.process import Mount, main
from penstock.gateway.store.tables import Role
from penstock.gateway.text_listener import text_listener
from penstock.launch.cli.app import app
from penstock.launch.cli.plugin_commands import encoding_mistake
from penstock.launch.commands.certificates import authority_of, issue
from penstock.launch.commands.request import Order as RequestOrder
from penstock.launch.gateway.gateway_commands import (
    SiteOptions,
    chosen_site,
    further_mounts,
    loop_words,
    named_agents,
)
from penstock.launch.gateway.job_templates import TemplateFolder, check_templates
from penstock.launch.gateway.kubernetes_runner import read_cluster
from penstock.launch.gateway.local_runner import RUN_FOLDER, JobFolders
from penstock.launch.gateway.run_behind import NamedRun, NamedServer
from penstock.launch.gateway.run_steering import PodSteering, RunSteering
from penstock.launch.jobs.job_process import EXIT_BEGUN_BEFORE, IN_A_POD
from penstock.policy import weights
from penstock.registry.registry import Registry
from penstock.registry.weight_files import path_of, read_kept, registry_url
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.chat.http.chat_routes import site as chat_site
from tests.support.gateway.job_templates import write_run
from tests.support.run.harness import eventually

# ---- `penstock gateway`: where its extra is absent, and what the operator's commands keep to themselves.


@pytest.mark.parametrize("words", [("gateway",), ("gateway", "user", "add", "ann", "--project", "p")])
def test_without_its_extra_there_is_no_gateway(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    reply = CliRunner().invoke(app, words)
    assert reply.exit_code == 2
    assert "no gateway without " in reply.stderr
    assert "jwt" in reply.stderr
    assert "penstock-rl[gateway]" in reply.stderr


@pytest.fixture
def public_umask() -> Iterator[None]:
    """A process whose files all users may read; the umask of before comes back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("public_umask")
@pytest.mark.parametrize("words", [("user", "add", "ann", "--project", "p"), ("migrate",)])
def test_only_its_user_reads_a_database(words: tuple[str, ...], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    reply = CliRunner().invoke(
        app, ("gateway", *words, "--state", str(state)), input="correct horse battery staple\n"
    )
    assert reply.exit_code == 0, reply.output
    modes = {file.name: file.stat().st_mode & 0o777 for file in state.iterdir()}
    assert "accounts.sqlite" in modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize(
    ("held", "said"), [(b"", "12 to 256"), ("geheime-Losung-ß".encode("latin-1"), "not UTF-8")]
)
def test_a_file_without_a_password_is_named_and_not_shown(held: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(held)
    words = ("user", "add", "ann", "--project", "p", "--password-file", str(file))
    reply = CliRunner().invoke(app, ("gateway", *words, "--state", str(tmp_path / "state")))
    assert reply.exit_code == 2
    assert said in reply.stderr
    assert "geheime" not in reply.output
    assert "index" not in reply.stderr


def test_a_token_that_ends_after_the_calendar_is_refused(tmp_path: Path) -> None:
    words = ("token", "add", "t", "--project", "p", "--days", "36500000", "--state", str(tmp_path))
    reply = CliRunner().invoke(app, ("gateway", *words))
    assert reply.exit_code == 2
    assert "--days" in reply.stderr


@pytest.mark.parametrize("command", [("user", "add", "ada", "--project", "alpha"), ("migrate",)])
@pytest.mark.parametrize("option", ["--state", "--database", "--registry", "--keys"])
def test_an_option_before_the_command_is_refused(
    option: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("gateway", option, str(tmp_path / "named"), *command)
    reply = CliRunner().invoke(app, words, input="correct horse battery staple\n")
    assert reply.exit_code == 2
    assert f"{option}: belongs behind the command: penstock gateway {command[0]}" in reply.stderr
    assert not list(tmp_path.iterdir())


def test_the_content_of_a_binary_file_is_not_repeated() -> None:
    told = encoding_mistake(UnicodeDecodeError("utf-8", b"geheim\xff", 6, 7, "invalid start byte"))
    assert "geheim" not in told
    assert "byte 6" in told


def call(state: Path, *words: str) -> Result:
    """`penstock gateway …` on the accounts of a folder."""
    typed = "correct horse battery staple\n"
    return CliRunner().invoke(app, ("gateway", *words, "--state", str(state)), input=typed)


@pytest.mark.parametrize(
    "words",
    [
        ("token", "add", "t", "--project", "typo"),
        ("user", "grant", "eve", "--project", "typo", "--role", "editor"),
        ("user", "add", "bob", "--project", "typo", "--role", "viewer"),
    ],
)
def test_a_mistyped_project_is_not_made(words: tuple[str, ...], tmp_path: Path) -> None:
    assert call(tmp_path, "user", "add", "ada", "--project", "alpha").exit_code == 0
    assert call(tmp_path, "user", "add", "eve", "--project", "alpha", "--role", "viewer").exit_code == 0
    reply = call(tmp_path, *words)
    assert reply.exit_code == 2, reply.output
    assert "project: 'typo' is absent (there are: alpha)" in reply.stderr
    assert "penstock gateway user add NAME --project typo" in reply.stderr
    assert call(tmp_path, "token", "add", "t", "--project", "alpha").exit_code == 0
    assert call(tmp_path, "user", "grant", "ada", "--project", "beta", "--role", "owner").exit_code == 0
    assert call(tmp_path, *(word.replace("typo", "beta") for word in words)).exit_code == 0


def test_a_refused_person_leaves_no_accounts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert call(state, "user", "add", "ann", "--project", "No Project").exit_code == 2
    assert not state.exists()


# ---- The place of jobs has one name, which a loss of power does not take.


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A folder of templates, with none in it."""
    made = tmp_path / "templates"
    made.mkdir()
    return made


def test_the_name_of_a_place_is_on_disk_before_use(
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


def test_gateways_that_start_together_share_one_place(tmp_path: Path, templates: Path) -> None:
    jobs = tmp_path / "jobs"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: JobFolders(jobs, templates).place, range(8)))
    assert len(found) == 1
    assert all(found)
    assert [path.name for path in jobs.iterdir()] == ["place"]


# ---- The first process of a job's pod: once for a job, however many pods a cluster starts.


AROUND: Final = (sys.executable, "-P", "-m", "penstock.launch.jobs.job_process", IN_A_POD)


def test_a_job_process_notes_its_start_and_a_second_one_does_nothing(tmp_path: Path) -> None:
    said = "import sys; print('out'); sys.exit(3)"
    command = (*AROUND, str(tmp_path), "output", sys.executable, "-c", said)
    assert subprocess.run(command, check=False).returncode == 3
    assert json.loads((tmp_path / "begun.json").read_text()).keys() == {"pid", "host"}
    assert json.loads((tmp_path / "ended.json").read_text()) == {"code": 3}
    assert (tmp_path / "output").read_text() == "out\n"
    assert subprocess.run(command, check=False).returncode == EXIT_BEGUN_BEFORE
    assert (tmp_path / "output").read_text() == "out\n"


def test_a_signal_reaches_the_running_command(tmp_path: Path) -> None:
    waits = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    command = (*AROUND, str(tmp_path), "output", sys.executable, "-c", waits)
    process = subprocess.Popen(command, start_new_session=True)
    output, pause = tmp_path / "output", threading.Event()
    while not (output.exists() and output.read_text()):
        assert process.poll() is None
        pause.wait(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert json.loads((tmp_path / "ended.json").read_text()) == {"code": 130}


# ---- Templates of jobs: what is wrong is told when the gateway starts, and harms nothing while it
# serves.


NUMBER = """
[template.numbers.maxSteps]
settings = {{"learner.total_steps" = 512}}
least = {least}
most = {most}
default = {default}
whole = true
"""


def number(least: str = "1", most: str = "10", default: str = "2") -> str:
    """A template with one number."""
    return NUMBER.format(least=least, most=most, default=default)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (number(least="5", most="1", default="3"), "must lie between"),
        (number(default="11"), "must lie between"),
        (number(least="nan"), "finite"),
        (number(most="inf"), "finite"),
        (number(default="2.5"), "must be whole"),
        ('[template]\nkind = "rlfh"', "use one of: rlhf"),
        ('[template]\nheading = "a"', "template.heading"),
        ('environment = "CartPole-v1"', "write a table, as .environment."),
        ("x = [", "cannot be read as TOML"),
    ],
)
def test_a_template_number_that_could_never_be_chosen_is_refused_at_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "one.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as raised:
        check_templates(tmp_path, {"rlhf"})
    assert str(tmp_path / "one.toml") in str(raised.value)


def a_pipe(file: Path) -> None:
    """Make one without a writer."""
    os.mkfifo(file)


def a_device(file: Path) -> None:
    """Make one that never ends."""
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [a_pipe, a_device, Path.mkdir])
def test_only_plain_files_are_read_as_templates(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "one.toml")
    with pytest.raises(ConfigurationError, match="is no file"):
        check_templates(tmp_path, {"rlhf"})


def test_a_half_written_template_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one.toml").write_text(number(most="10"))
    (tmp_path / "two.toml").write_text(number())
    folder = TemplateFolder(tmp_path)
    caplog.set_level(logging.WARNING)
    (tmp_path / "one.toml").write_text(number(most="20")[:-9])
    (tmp_path / "new.toml").write_text("[templ")
    for _ in range(3):
        assert folder.templates().keys() == {"one", "two"}
        assert folder.templates()["one"].numbers["maxSteps"].most == 10
        assert folder.templates()["one"].recipe == {}
    assert len(caplog.records) == 2
    (tmp_path / "one.toml").write_text(number(most="20"))
    (tmp_path / "two.toml").unlink()
    assert folder.templates().keys() == {"one"}
    assert folder.templates()["one"].numbers["maxSteps"].most == 20


# ---- The file that describes a cluster: what is wrong in it is named before anything is begun.


BOUNDS = '[requests]\ncpu = "1"\nmemory = "1Gi"\n[limits]\ncpu = "2"\nmemory = "2Gi"\n'
HEAD = 'namespace = "trainings"\nimage = "penstock-trainer:0.1.0"\nclaim = "state"\n'


def test_an_omitted_key_of_the_cluster_file_has_a_default(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(HEAD + BOUNDS)
    found = read_cluster(tmp_path / "cluster.toml")
    assert (found.service_account, found.registry_secret, found.claim_folder) == ("trainer", None, "")
    assert found.limits == {"cpu": "2", "memory": "2Gi"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("namespace = ", "cannot be read as TOML"),
        (BOUNDS, "namespace: Field required"),
        (HEAD, "requests: Field required"),
        (HEAD + 'pod = "x"\n' + BOUNDS, "pod: Extra inputs"),
        (HEAD.replace("trainings", "Kube_System") + BOUNDS, "namespace: String should match"),
        (HEAD.replace('"state"', '"../state"') + BOUNDS, "claim: String should match"),
        (HEAD + 'claim_folder = "../other"\n' + BOUNDS, "claim_folder: String should match"),
        (HEAD.replace(":0.1.0", ":latest") + BOUNDS, "image: Value error, name a tag"),
        (HEAD.replace(":0.1.0", "") + BOUNDS, "image: Value error, name a tag"),
        (HEAD + BOUNDS.replace('memory = "2Gi"', ""), "limits: Value error, say memory"),
        (HEAD + BOUNDS.replace('"2Gi"', '"much"'), "limits: Value error, memory='much'"),
        (HEAD + "grace_s = 0\n" + BOUNDS, "grace_s: Input should be greater"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_cluster(file)
    assert str(caught.value).startswith(f"--cluster {file}: {told}")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent.toml: cannot be read"):
        read_cluster(tmp_path / "absent.toml")


# ---- The file that names a provider: what is wrong in it is named, before anything is served.


WHOLE = """
issuer = "https://accounts.example"
client_id = "penstock"
client_secret_file = "secret"
gateway = "https://gateway.example/"
[domains."Example.com"]
project = "alpha"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the secret of the client."""
    (tmp_path / "secret").write_text("of the client\n")
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


def test_a_complete_file_is_read(folder: Path) -> None:
    (folder / "oidc.toml").write_text(WHOLE)
    found = read_provider(folder / "oidc.toml")
    assert (found.client_secret, "of the client" in repr(found)) == ("of the client", False)
    assert found.redirect == "https://gateway.example/api/auth/oidc/callback"
    assert found.domains["example.com"].role is Role.VIEWER


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("https://accounts", "http://accounts", "issuer: use https"),
        ("https://gateway", "http://gateway", "gateway: use https"),
        ('client_id = "penstock"', "", "client_id"),
        ('client_id = "penstock"', 'client_id = ""', "client_id"),
        ('client_id = "penstock"', "client_id = ", "cannot be read as TOML"),
        ('"secret"', '"absent"', "client_secret_file='.*absent': .*cannot be read"),
        ('project = "alpha"', 'project = "No Project"', "Example.com.project"),
        ('project = "alpha"', 'project = "alpha"\nrole = "owner"', "role: use viewer or editor"),
        ('project = "alpha"', 'project = "alpha"\nmore = 1', "more"),
    ],
)
def test_mistakes_in_the_file_of_a_provider_are_named(folder: Path, old: str, new: str, told: str) -> None:
    (folder / "oidc.toml").write_text(WHOLE.replace(old, new))
    with pytest.raises(ConfigurationError, match=told):
        read_provider(folder / "oidc.toml")


def test_a_secret_that_others_may_read_is_refused(folder: Path) -> None:
    (folder / "oidc.toml").write_text(WHOLE)
    (folder / "secret").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_provider(folder / "oidc.toml")


# ---- Decisions about the versions of a job whose run is over, as the gateway has them carried out.


JOB: Final = "j1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a job's run that is over: versions 3, 5 and 9, of which 3 was worth serving first."""
    return write_run(tmp_path / JOB / RUN_FOLDER)


def active(steering: RunSteering) -> dict[str, Any]:
    """The one version that clients get."""
    (found,) = [one for one in steering.versions(JOB)["versions"] if one["status"] == "active"]
    return dict(found)


def test_after_a_rollback_the_version_before_is_active_and_can_be_served(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    first = read_kept(run, 3, active(steering)["sha256"])
    for version in (9, 5):
        steering.promote(JOB, version, to="active", canary_share=None, reason="better", by="ada")
        assert active(steering)["version"] == version
        said = steering.roll_back(JOB, version, reason="worse", by="ada")
        found = active(steering)
        assert (said["withdrawn"]["version"], said["active"]["version"]) == (version, found["version"])
        assert (found["origin"], said["awaits_number"]) == ("rollback", False)
        assert read_kept(run, found["version"], found["sha256"]) == first


def test_a_version_is_read_as_a_file_only_as_it_was_registered(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    file = steering.weights(JOB, 5)
    with file.content as opened:
        content = opened.read()
    assert (file.name, weights.sha256(content)) == (
        "default-5.safetensors",
        steering.versions(JOB)["versions"][1]["sha256"],
    )
    with pytest.raises(CannotSteer, match="version=7"):
        steering.weights(JOB, 7)
    path_of(run, 5).write_bytes(content[:-1] + b"x")
    with pytest.raises(CannotSteer, match="damaged"):
        steering.weights(JOB, 5)


def test_a_version_with_none_before_it_stays_active_and_the_refusal_says_what_to_do(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    with pytest.raises(CannotSteer, match="promote another version instead"):
        steering.roll_back(JOB, 3, reason="worse", by="ada")
    assert active(steering)["version"] == 3


def test_a_withdrawn_canary_leaves_the_active_version(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    steering.promote(JOB, 9, to="canary", canary_share=0.1, reason="try", by="ada")
    assert steering.roll_back(JOB, None, reason="worse", by="ada")["active"]["version"] == 3
    assert active(steering)["version"] == 3


def test_a_version_can_be_promoted_by_its_name(run: Path) -> None:
    steering = RunSteering(lambda job: run.parents[1] / job / RUN_FOLDER)
    with Registry.open(f"sqlite:///{run / 'registry.sqlite'}") as registry:
        other = next(one.version for one in registry.list("default") if one.version != 3)
        registry.name("default", other, "v15")
    with pytest.raises(CannotSteer, match="is called 'v99'"):
        steering.promote(JOB, "v99", to="active", canary_share=None, reason="better", by="ada")
    made = steering.promote(JOB, "v15", to="active", canary_share=None, reason="better", by="ada")
    assert made["version"] == other
    named = {one["version"]: one["label"] for one in steering.versions(JOB)["versions"]}
    assert (named[3], named[other]) == (None, "v15")
    assert steering.roll_back(JOB, "v15", reason="worse", by="ada")


@pytest.mark.parametrize("action", Action)
def test_a_run_in_a_pod_takes_no_commands_but_decisions_about_versions(
    run: Path, tmp_path: Path, action: Action
) -> None:
    steering = PodSteering(lambda job: tmp_path / job / RUN_FOLDER, registry_url(run))
    with pytest.raises(CannotSteer, match=f"{action}: the run of this job is in a pod"):
        steering.order(JOB, Order(action=action))
    assert [one["version"] for one in steering.versions(JOB)["versions"]] == [3, 5, 9]


# ---- `penstock gateway NAME`: further agents that cannot be meant, each refused by its name.


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("labels=0", "--loop: --labels 0: must be at least 1"),
        ("labels=many", "--loop: .*--labels.*integer"),
        ("label=9", "--loop: No such option: --label"),
        ("once=1", "--loop: Option '--once' does not take a value"),
        ("share=0.9", "--loop: --share 0.9: must be above 0 and at most 0.8"),
        ("weight=charm=1", "--loop: --weight charm: there is no such head; use thumb"),
        ("reward=epochs=-1", "--loop: --reward epochs=-1: .* greater than 0"),
        ("train=learner.total_step=9", "--loop: --train learner.total_step: unknown key"),
    ],
)
def test_a_loop_that_could_not_begin_is_refused_before_its_gateway_does(said: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        loop_words("chat", chat_site(), ["patience=9", said], learn=True, server="")
    words = loop_words("chat", chat_site(), ["labels=9", "weight=thumb=2"], learn=True, server="")
    assert words == ("--labels=9", "--weight=thumb=2")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["coder"], "--agent 'coder': write NAME=DIR or NAME=ADDRESS"),
        (["../x=127.0.0.1:1"], "a name has 1 to 64 of"),
        (["a=127.0.0.1:1", "a=127.0.0.1:2"], "a is named twice"),
        (["a=nowhere"], "--agent: "),
    ],
)
def test_an_invalid_agent_is_named(said: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        named_agents(said, Settings())


def test_a_site_with_several_agents_takes_folders_and_addresses(tmp_path: Path) -> None:
    said = [f"run={tmp_path}", "server=127.0.0.1:50055"]
    found = named_agents(said, Settings())
    assert {name: type(one) for name, one in found.items()} == {"run": NamedRun, "server": NamedServer}
    with pytest.raises(ConfigurationError, match="prompts serves one run"):
        chosen_site("prompts", SiteOptions(agents=said), Settings())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["chat", "prompts"], "--site prompts: chat listens at 127.0.0.1:8765, too: say --site prompts=HOST"),
        (["chats"], "--site chats: no such site; there are .*prompts, text"),
        (
            ["chat=0.0.0.0:1"],
            "--site chat=0.0.0.0:1: .* only this machine: serve it with `penstock gateway chat`",
        ),
    ],
)
def test_sites_that_a_gateway_cannot_serve_are_refused(said: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        main(Lifecycle("gateway"), Settings(), further_mounts(said, Settings()))


@contextmanager
def answering() -> Iterator[Any]:
    """A listener that has something to serve."""
    yield text_listener(None), {}  # type: ignore[arg-type]


def broken() -> Any:
    """A listener that cannot be made."""
    raise ConfigurationError("its recipe is gone")


@asynccontextmanager
async def begun_in_vain(_app: Any) -> AsyncIterator[None]:
    """What a listener works with, which cannot be made."""
    await asyncio.to_thread(Path(__file__, "state").mkdir)
    yield


@contextmanager
def lifeless() -> Iterator[Any]:
    """A listener that can be made, and whose application does not begin."""
    yield replace(text_listener(None), life=begun_in_vain), {}  # type: ignore[arg-type]


@contextmanager
def served(settings: Settings, *mounts: Mount) -> Iterator[list[int]]:
    """The mounts while the block runs, once each listens; behind it the list holds the exit code."""
    lifecycle, codes = Lifecycle("gateway"), list[int]()
    thread = threading.Thread(target=lambda: codes.append(main(lifecycle, settings, mounts)))
    thread.start()
    try:
        for one in mounts:
            eventually(partial(is_up, one.listen), one.name, 60)
        yield codes
    finally:
        lifecycle.drain("the test is over")
        thread.join()


def free_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(("opened", "why"), [(broken, "its recipe is gone"), (lifeless, "Not a directory")])
def test_a_site_that_cannot_be_made_names_the_cause_and_the_others_stay_up(opened: Any, why: str) -> None:
    whole, chat = (
        Mount(name=name, listen=free_address(), open=made, is_one_of_several=True)
        for name, made in (("whole", answering), ("chat", opened))
    )
    with served(Settings(), whole, chat) as codes:
        refused = requests.get(f"http://{chat.listen}/chat", timeout=60)
        assert refused.status_code == 503
        assert "chat is not served: " in refused.text
        assert why in refused.text
        assert requests.get(f"http://{whole.listen}/nothing", timeout=60).status_code == 404
    assert codes == [0]


def test_agents_are_answered_in_plaintext_where_the_gateway_has_a_certificate(tmp_path: Path) -> None:
    order = RequestOrder(run="run", folder=tmp_path, hosts=(), actors=(), passwords=(), days=1.0)
    issue(authority_of(tmp_path), order, "gateway", None)
    files = {"tls_certificate": tmp_path / "gateway.pem", "tls_key": tmp_path / "gateway.key"}
    settings = Settings.model_validate({"security": files})
    (text,) = further_mounts([f"text={free_address()}"], settings)
    with served(settings, text):
        reply = requests.get(f"http://{text.listen}/v1/models", timeout=60)
    assert reply.status_code == 503
    assert "text is not served" in reply.text


def is_up(place: str) -> bool:
    """Whether something listens there."""
    host, _, port = place.rpartition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0
