"""A training puts links, pipes and devices in the place of what its gateway reads and writes of its job.

A link would lead to what the gateway may read, as its signing keys: nothing of that is in any answer, no call
waits or fails, and no file elsewhere changes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.config.run_folder import NoPlainFile
from penstock.config.service_settings import calling_security
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import Action, CannotBegin, CannotSteer, Job, Order, Outcome
from penstock.gateway.store.tables import JobState, Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.launch.gateway.run_steering import RunSteering
from penstock.launch.jobs.job_process import BEGUN_FILE, ENDED_FILE, IN_A_POD
from penstock.launch.jobs.local_job import read_noted
from penstock.registry.weight_files import name_latest, registry_url, write_kept
from penstock.workloads.rlhf.policy_service import FeedbackTraining
from tests.support.gateway.job_templates import taken_job, write_run, write_templates
from tests.support.gateway.small_gateway import SmallGateway

SECRET: Final = "4242424242"  # noqa: S105 - of no account
"""A number, so that it can stand in a curve, too."""
AT_S: Final = float(SECRET)
"""When the file with it was written."""
PARTS: Final = {
    "training_results.json": f'{{"of": {SECRET}}}',
    "policies/v9/adapter.json": f'{{"of": {SECRET}}}',
    "reward_model/model.json": f'{{"of": {SECRET}}}',
    "base_model/model.json": f'{{"of": {SECRET}}}',
}
"""Of a training from feedback, below `run`."""
pytestmark = pytest.mark.timeout(120)


@dataclass
class Stand:
    """A gateway with a job that has ended: its folder lies beside what nobody may see."""

    gateway: SmallGateway
    runner: LocalRunner
    job: Job
    elsewhere: Path

    @property
    def folder(self) -> Path:
        return self.runner.jobs / self.job.id

    @property
    def steering(self) -> Any:
        assert self.gateway.parts.dispatcher is not None
        return self.gateway.parts.dispatcher.steering_of(self.job)

    def get(self, path: str) -> str:
        """Return what a viewer is answered, of which the status is none of a fault."""
        url = f"/api/projects/alpha/jobs/{self.job.id}/{path}"
        reply = self.gateway.get(url, self.gateway.token("alpha", Role.VIEWER))
        assert reply.status_code < 500, reply.text
        return f"{reply.status_code} {reply.text}"

    def order(self) -> str:
        with pytest.raises(CannotSteer) as raised:
            self.steering.order(self.job.id, Order(action=Action.PAUSE))
        return str(raised.value)

    def weights(self) -> str:
        """Return why there are no weights of a version; the secret where there are."""
        try:
            self.steering.weights(self.job.id, 3)
        except CannotSteer as error:
            return str(error)
        return SECRET

    def concluded(self) -> str:
        """Return all that is exported of the training, or why nothing is."""
        models, outcome = self.elsewhere.parent / "models", Outcome(state=JobState.FINISHED, summary={})
        job = replace(self.job, facts={"feedbackCount": 20})
        try:
            FeedbackTraining().conclude(job, outcome, (), folder=self.folder, models=models)
        except (OSError, ValueError) as error:
            return str(error)
        return "".join(one.read_text() for one in models.rglob("*") if one.is_file())


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    runner = LocalRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    url = f"sqlite:///{tmp_path}/registry.sqlite"
    gateway = SmallGateway.at(f"sqlite:///{tmp_path}/accounts.sqlite", url, tmp_path, runner=runner)
    dispatcher = gateway.parts.dispatcher
    assert dispatcher is not None
    asked = gateway.client.post(
        "/api/projects/alpha/jobs",
        json={"agent": "mine", "template": "quick"},
        headers=gateway.token("alpha"),
    )
    job = gateway.accounts.run(lambda session, now: job_queue.claim(session, now, runner.place, 1))
    assert job is not None
    assert job.id == asked.json()["id"]
    run = write_run(runner.folder(job.id) / "run", "alpha/mine")
    dispatcher.steering = RunSteering(runner.run_folder, _moved(registry_url(run), tmp_path / "of_run"))
    (run / "config.toml").write_text("seed = 1\n")
    for name, content in PARTS.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(content.replace(SECRET, "0"))
    manifest = {"policy": "policies/v9", "made_from": {"model": ""}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run.parent / "lock").touch()
    (run.parent / "begun.json").write_text('{"group": 0}')
    (run.parent / "ended.json").write_text('{"code": 1}')
    (run.parent / "train.log").touch()
    gateway.accounts.run(
        lambda session, now: job_queue.settle(session, now, job.id, Outcome(state=JobState.FAILED), None)
    )
    (tmp_path / "elsewhere").mkdir()
    yield Stand(gateway, runner, job, tmp_path / "elsewhere")
    with closing(gateway.registry):
        pass


def _moved(url: str, target: Path) -> str:
    """Have a registry of one file lie elsewhere; returns its URL."""
    shutil.move(url.removeprefix("sqlite:///"), target)
    return f"sqlite:///{target}"


def _caused(stand: Stand) -> str:
    found = stand.runner.find(stand.job.id)
    return found.cause if isinstance(found, Outcome) else found.value


Ask = Callable[[Stand], str]
READS: Final[dict[str, tuple[str, str | None, Ask]]] = {
    "log": ("train.log", f"{SECRET}\n", lambda stand: stand.get("log")),
    "cause by log": ("train.log", f"{SECRET}\n", _caused),
    "heard by log": ("train.log", "", lambda stand: str(stand.runner.heard(stand.job.id))),
    "lock": ("lock", SECRET, _caused),
    "begun": (
        "begun.json",
        f'{{"group": {SECRET}}}',
        lambda s: str(read_noted(s.runner.jobs / s.job.id / BEGUN_FILE)),
    ),
    "begun at all": ("begun.json", SECRET, _caused),
    "ended": ("ended.json", f'{{"code": {SECRET}}}', _caused),
    "summary": ("run/summary.json", f'{{"failure": "{SECRET}", "interrupted": false}}', _caused),
    "curve": ("run/metrics.jsonl", f'{{"env_steps": {SECRET}}}\n', lambda stand: stand.get("curve")),
    "heard by run": ("run/metrics.jsonl", "", lambda stand: str(stand.runner.heard(stand.job.id))),
    "versions": ("run/config.toml", f"seed = {SECRET}{SECRET}\n", lambda stand: stand.get("versions")),
    "endpoints": ("run/endpoints.json", f'{{"broker": {{"{SECRET}": 1}}}}', Stand.order),
    "weights": ("run/policies/3.safetensors", None, Stand.weights),
    "settings of weights": ("run/config.toml", f"x{SECRET} = 1\n", Stand.weights),
    "export": ("run/manifest.json", f'{{"policy": "{SECRET}"}}', Stand.concluded),
    **{f"export {name}": (f"run/{name}", content, Stand.concluded) for name, content in PARTS.items()},
}
"""What is read, by the file, what it holds (None: what the run left), and how it is asked for."""
UNTOLD: Final = {"lock", "begun at all"}
"""Those of which an answer has nothing: they are not to be waited for."""


def _link(place: Path, elsewhere: Path) -> None:
    place.symlink_to(elsewhere / place.name)


def _linked_folder(place: Path, elsewhere: Path) -> None:
    """The folder around it is a link, where all else that was in it lies, too."""
    for one in place.parent.iterdir():
        shutil.move(one, elsewhere) if not (elsewhere / one.name).exists() else None
    shutil.rmtree(place.parent)
    place.parent.symlink_to(elsewhere)


PLANTED: Final[dict[str, Callable[[Path, Path], None]]] = {
    "link": _link,
    "folder": _linked_folder,
    "pipe": lambda place, _: os.mkfifo(place),
    "device": lambda place, _: place.symlink_to("/dev/zero"),
    "dangling": lambda place, elsewhere: place.symlink_to(elsewhere / "nowhere"),
}


def _written(stand: Stand, read: str, folder: Path) -> Path:
    """What is read, in a folder; what the run left in its place is gone."""
    name, content, _ = READS[read]
    place = stand.folder / name
    held = place.read_bytes() if content is None else content.encode()
    place.unlink(missing_ok=True)
    file = folder / place.name
    file.write_bytes(held)
    os.utime(file, (AT_S, AT_S))
    return place


@pytest.mark.promise("training-makes-gateway-neither")
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("read", READS)
def test_links_that_a_training_makes_are_not_followed(stand: Stand, read: str, planted: str) -> None:
    place = _written(stand, read, stand.elsewhere)
    PLANTED[planted](place, stand.elsewhere)
    assert SECRET not in READS[read][2](stand)


@pytest.mark.parametrize("read", sorted(READS.keys() - UNTOLD))
def test_an_answer_shows_the_trainings_own_log_and_curve(stand: Stand, read: str) -> None:
    _written(stand, read, (stand.folder / READS[read][0]).parent)
    assert SECRET in READS[read][2](stand)


@pytest.mark.promise("training-makes-gateway-neither")
@pytest.mark.parametrize("planted", ["link", "pipe", "device"])
@pytest.mark.parametrize("name", ["job.toml", "lock", "starts", "train.log", "run/.probe-{pid}"])
def test_the_gateway_writes_through_no_link(stand: Stand, name: str, planted: str) -> None:
    for one in ("lock", "begun.json", "ended.json", "train.log"):
        (stand.folder / one).unlink()
    name = name.format(pid=os.getpid())
    place, kept = stand.folder / name, stand.elsewhere / Path(name).name
    kept.write_text(SECRET)
    PLANTED[planted](place, stand.elsewhere)
    if place.parent == stand.folder:
        with pytest.raises(NoPlainFile, match=place.name):
            stand.runner.begin(replace(taken_job(), id=stand.job.id), {})
    else:
        assert place.name in stand.runner.outcome(stand.job.id).cause
    assert kept.read_text() == SECRET


@pytest.mark.promise("training-makes-gateway-neither")
@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_the_log_of_a_dry_run_stays_in_its_folder(stand: Stand, planted: str) -> None:
    kept = stand.elsewhere / "train.log"
    kept.write_text(SECRET)

    def plant(folder: Path) -> dict[str, Any]:
        PLANTED[planted](folder / "train.log", stand.elsewhere)
        return {"no_such_section": {"of": 1}}

    with pytest.raises(CannotBegin, match="no_such_section"):
        stand.runner.estimate("quick", {}, plant)
    assert kept.read_text() == SECRET


@pytest.mark.promise("training-makes-gateway-neither")
def test_the_note_of_an_end_stays_in_its_folder(tmp_path: Path) -> None:
    folder, kept = tmp_path / "job", tmp_path / "kept"
    folder.mkdir()
    kept.write_text(SECRET)
    plant = f"import os; [os.symlink({str(kept)!r}, f'ended.{{end}}') for end in ('tmp', 'json', 'json.tmp')]"
    around = ("-P", "-m", "penstock.launch.jobs.job_process", IN_A_POD, str(folder), "output")
    done = subprocess.run([sys.executable, *around, sys.executable, "-c", plant], check=False)
    assert done.returncode == 0
    assert kept.read_text() == SECRET
    assert json.loads((folder / ENDED_FILE).read_bytes()) == {"code": 0}
    assert not (folder / ENDED_FILE).is_symlink()


@pytest.mark.promise("training-makes-gateway-neither")
def test_weights_that_a_rollback_writes_stay_in_its_folder(stand: Stand) -> None:
    run = stand.runner.run_folder(stand.job.id)
    _linked_folder(run / "policies" / "3.safetensors", stand.elsewhere)
    before = {file.name: file.read_bytes() for file in stand.elsewhere.iterdir() if file.is_file()}
    with pytest.raises(NoPlainFile, match="links are not followed"):
        write_kept(run, 4, SECRET.encode())
    with pytest.raises(NoPlainFile, match="links are not followed"):
        name_latest(run, "4.safetensors")
    assert before == {file.name: file.read_bytes() for file in stand.elsewhere.iterdir() if file.is_file()}


def test_a_person_is_told_why_log_and_curve_are_missing(stand: Stand) -> None:
    for name, path in (("train.log", "log"), ("run/metrics.jsonl", "curve")):
        _link(_written(stand, path, stand.elsewhere), stand.elsewhere)
        said = stand.get(path)
        assert f"{Path(name).name}: is no file that may be opened here, where links are not followed" in said


@pytest.mark.promise("training-makes-gateway-neither")
@pytest.mark.parametrize("policy", ["../../../elsewhere", "{elsewhere}", 3])
def test_a_manifest_names_no_folder_elsewhere(stand: Stand, policy: Any) -> None:
    (stand.elsewhere / "secret").write_text(SECRET)
    named = policy.format(elsewhere=stand.elsewhere) if isinstance(policy, str) else policy
    manifest = {"policy": named, "made_from": {"model": ""}}
    (stand.folder / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert "policy" in stand.concluded()


def _no_file_of_tls(stand: Stand) -> None:
    os.mkfifo(stand.folder / "run/pipe")
    (stand.folder / "run/config.toml").write_text(f'[security]\ntls_authority = "{stand.folder}/run/pipe"\n')


def _a_key_of_many_parts(stand: Stand) -> None:
    (stand.folder / "run/config.toml").write_text(".".join("a" * 200_000) + " = 1\n")


def _weights_without_end(stand: Stand) -> None:
    os.truncate(stand.folder / "run/policies/3.safetensors", 1 << 40)


def _curve_without_end(stand: Stand) -> None:
    with (stand.folder / "run/metrics.jsonl").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"env_steps": 7}\n')


@pytest.mark.parametrize(
    ("plant", "ask", "answer"),
    [
        (_no_file_of_tls, lambda s: str(calling_security(s.folder / "run", None, ())), "tls_authority=None"),
        (_a_key_of_many_parts, lambda stand: stand.get("versions"), "config.toml: has more than"),
        (_weights_without_end, Stand.weights, "damaged"),
        (_curve_without_end, lambda stand: stand.get("curve"), "[7]"),
    ],
)
@pytest.mark.timeout(30)
def test_no_file_of_a_training_blocks_its_gateway(
    stand: Stand, plant: Callable[[Stand], None], ask: Ask, answer: str
) -> None:
    plant(stand)
    assert answer in ask(stand)


def test_a_training_cannot_name_the_policy_of_another_project(stand: Stand) -> None:
    before = stand.get("versions")
    (stand.folder / "run/config.toml").write_text('[serving]\npolicy = "beta/secret"\n')
    assert stand.get("versions") == before
    assert '"alpha/mine"' in before
