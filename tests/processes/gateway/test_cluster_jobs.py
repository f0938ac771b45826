"""Jobs on a cluster, of an API server of the tests: in each state of a job, and of what is known of it."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("kubernetes", reason="a cluster needs its extra")
pytest.importorskip("kubernetes_validate", reason="what objects are checked by")

import psutil

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.jobs.job_records import CannotBegin, CannotLook, Outcome, Stage
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway import kubernetes_runner
from penstock.launch.gateway.kubernetes_runner import Cluster, KubernetesRunner, name_of, read_cluster
from penstock.launch.jobs.job_process import BEGUN_FILE, EXIT_BEGUN_BEFORE
from penstock.launch.jobs.local_job import read_noted
from tests.support.gateway.api_server import ApiServer
from tests.support.gateway.gateway_stand import JOBS, LONG, Client, new_token
from tests.support.gateway.job_templates import taken_job, write_templates
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import find_programs

PATIENCE_S: Final = 240.0
CLUSTER: Final = """
namespace = "penstock-gateway"
image = "penstock-trainer:0.1.0"
claim = "state"
claim_folder = "jobs"
registry_secret = "database"
start_s = 60
[requests]
cpu = "1"
memory = "1Gi"
[limits]
cpu = "2"
memory = "2Gi"
"""
FAILED: Final = [{"type": "Failed", "status": "True", "message": "Job has reached the backoff limit"}]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path)
    made.begin()
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    monkeypatch.setattr(kubernetes_runner, "FRESH_S", 0.0)
    yield made
    made.end()


@pytest.fixture
def runners(tmp_path: Path, cluster: ApiServer) -> Callable[[], KubernetesRunner]:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    write_templates(tmp_path / "templates")
    described = read_cluster(tmp_path / "cluster.toml")
    return lambda: KubernetesRunner(tmp_path / "jobs", tmp_path / "templates", described)


def until(look: Callable[[], Any]) -> Any:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.25)):
        found = look()
        if found is not None:
            return found
        pause.wait(0.25)
    pytest.fail("it did not come to hold")


def ended(runner: KubernetesRunner, id_: str) -> Outcome:
    def look() -> Outcome | None:
        found = runner.find(id_)
        return found if isinstance(found, Outcome) else None

    found: Outcome = until(look)
    return found


def test_a_job_starts_once_is_found_by_others_and_its_end_outlives_its_object(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    first, one = runners(), taken_job()
    assert first.find(one.id) is Stage.NOT_BEGUN
    first.begin(one, {})
    assert runners().find(one.id) is Stage.GOING_ON
    runners().begin(one, {})  # one that was killed before it had noted anything begins again
    outcome = ended(runners(), one.id)
    assert (outcome.state, outcome.cause) == (JobState.FINISHED, "")
    assert outcome.summary is not None
    assert outcome.summary["updates"] >= 2
    assert cluster.created == [name_of(one.id)]
    assert first.read_log(one.id, 0, 1 << 16)
    assert first.read_curve(one.id)["updates"]
    cluster.take_away(name_of(one.id))  # its time to live is over
    again = runners().find(one.id)
    assert isinstance(again, Outcome)
    assert again.state is JobState.FINISHED


def test_a_second_pod_of_a_job_does_nothing(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job(steps=100_000)
    runner.begin(one, {})
    begun = runner.jobs / one.id / BEGUN_FILE
    noted = until(lambda: read_noted(begun))
    cluster.take_away(name_of(one.id))
    runner.begin(one, {})
    assert until(lambda: cluster.exit_code(name_of(one.id))) == EXIT_BEGUN_BEFORE
    assert read_noted(begun) == noted
    outcome = ended(runner, one.id)
    assert (outcome.state, "second time" in outcome.cause) == (JobState.LOST, True)
    first = psutil.Process(noted["pid"])
    first.terminate()
    first.wait(PATIENCE_S)


def test_a_job_that_is_cancelled_ends_in_order(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job(steps=100_000)
    assert runner.stop(one.id) is False
    runner.begin(one, {})
    until(lambda: True if runner.read_curve(one.id)["updates"] else None)
    assert runner.stop(one.id) is True
    outcome = ended(runner, one.id)
    assert outcome.state is JobState.CANCELLED
    assert cluster.there == []


def test_a_silent_cluster_starts_and_settles_no_job(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job()
    cluster.is_away = True
    for call in (lambda: runner.find(one.id), lambda: runner.begin(one, {}), lambda: runner.stop(one.id)):
        with pytest.raises(CannotLook, match="does not answer"):
            call()
    cluster.is_away = False
    for status in (401, 429, 500, 503):
        cluster.overload = status
        with pytest.raises(CannotLook, match="does not answer: the server has no time"):
            runner.begin(one, {})
    cluster.overload = 0
    assert cluster.created == []
    cluster.is_forbidden = True
    with pytest.raises(CannotBegin, match="jobs.batch is forbidden"):
        runner.begin(one, {})
    assert runner.find(one.id) is Stage.NOT_BEGUN


def test_an_image_that_cannot_be_pulled_is_awaited_and_then_given_up(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job()
    cluster.is_podless = True
    runner.begin(one, {})
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image penstock-trainer:0.1.0"}
    pod = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    cluster.say(name_of(one.id), [pod], [])
    assert runner.find(one.id) is Stage.GOING_ON
    cluster.grow_old(name_of(one.id), 61)
    outcome = runner.find(one.id)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.cause) == (
        JobState.FAILED,
        "its image cannot be pulled: Back-off pulling image penstock-trainer:0.1.0",
    )
    assert runners().find(one.id) == outcome
    assert cluster.there == []
    assert (runners().find(one.id), len(cluster.created)) == (outcome, 1)


def terminated(reason: str, code: int) -> dict[str, Any]:
    state = {"terminated": {"reason": reason, "exitCode": code}}
    return {"phase": "Failed", "containerStatuses": [{"state": state}]}


DRAINED: Final = {"type": "DisruptionTarget", "status": "True", "message": "node is being drained"}
EVICTED: Final = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
TERMINATED: Final[Mapping[str, tuple[dict[str, Any], JobState, str]]] = {
    "memory": (terminated("OOMKilled", 137), JobState.FAILED, "it needed more memory than its limit of 2Gi"),
    "eviction": (EVICTED, JobState.LOST, "its node had no room for it and evicted it: The node was low on"),
    "drain": (
        {"phase": "Failed", "conditions": [DRAINED]},
        JobState.LOST,
        "its pod was taken off its node: node is being drained",
    ),
    "exit": (terminated("Error", 1), JobState.FAILED, "it ended with exit code 1"),
}


@pytest.mark.parametrize("what", TERMINATED)
def test_the_cause_of_a_failed_job_names_what_the_cluster_did(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer, what: str
) -> None:
    status, state, cause = TERMINATED[what]
    runner, one = runners(), taken_job()
    cluster.is_podless = True
    runner.begin(one, {})
    cluster.say(name_of(one.id), [status, {"phase": "Running"}], FAILED)
    assert runner.find(one.id) is Stage.GOING_ON
    cluster.say(name_of(one.id), [status], FAILED)
    outcome = runner.find(one.id)
    assert isinstance(outcome, Outcome)
    assert outcome.state is state
    assert outcome.cause.startswith(cause)


def test_a_job_whose_object_disappears_is_lost_or_never_started(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job()
    cluster.is_podless = True
    runner.begin(one, {})
    cluster.take_away(name_of(one.id))
    assert runner.find(one.id) is Stage.NOT_BEGUN
    (runner.folder(one.id) / "begun.json").write_text('{"pid": 1, "host": "pod"}')
    outcome = runner.find(one.id)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, "taken away" in outcome.cause) == (JobState.LOST, True)


def test_a_failed_training_reports_its_own_error(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer
) -> None:
    runner, one = runners(), taken_job(template="wrong")
    runner.begin(one, {})
    outcome = ended(runner, one.id)
    assert outcome.state is JobState.FAILED
    assert "No-such-environment" in outcome.cause
    assert cluster.created == [name_of(one.id)]


def test_a_dry_run_is_made_by_a_pod_and_leaves_nothing(
    runners: Callable[[], KubernetesRunner], cluster: ApiServer, tmp_path: Path
) -> None:
    runner = runners()
    found = runner.estimate("quick", {"maxSteps": 2, "learningRate": 3e-4}, lambda _: {})
    assert found["seconds"] > 0
    with pytest.raises(CannotBegin, match="No-such-environment"):
        runner.estimate("wrong", {}, lambda _: {})
    assert len(cluster.created) == 2
    until(lambda: True if cluster.there == [] else None)
    assert [path.name for path in (tmp_path / "jobs").iterdir() if path.is_dir()] == []


@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_a_gateway_that_is_killed_finds_its_jobs_on_the_cluster_again(
    shared_database: str, cluster: ApiServer, tmp_path: Path
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    write_templates(tmp_path / "templates")
    options = (
        *("--database", shared_database, "--registry", shared_database, "--templates", "templates"),
        *("--runner", "kubernetes", "--cluster", "cluster.toml"),
    )
    token = new_token(tmp_path, "alpha", "--database", shared_database)
    with GatewayProcess(tmp_path, *options) as gateway:
        client = Client(gateway, token)
        long = client.submit("my_agent", steps=LONG)
        until(lambda: client.http.get(f"{JOBS}/{long['id']}/curve").json()["updates"] or None)
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    with GatewayProcess(tmp_path, *options) as gateway:
        client = Client(gateway, token)
        cluster.is_away = True
        until(lambda: "the cluster does not answer" in gateway.log.read_text() or None)
        assert client.job(long)["state"] == "running"
        cluster.is_away = False
        paused = client.http.post(f"{JOBS}/{long['id']}/control/pause", json={})
        assert (paused.status_code, "takes no orders" in paused.json()["detail"]) == (409, True)
        client.cancel(long)
        assert client.ended(long)["state"] == "cancelled"
        short = client.ended(client.submit("my_agent"))
        assert short["state"] == "finished", short
        versions = client.http.get(f"{JOBS}/{short['id']}/versions")
        assert versions.status_code == 200, versions.text
        assert versions.json()["versions"]
    assert cluster.created == [name_of(long["id"]), name_of(short["id"])]


def a_runner(tmp_path: Path) -> KubernetesRunner:
    bounds = {"cpu": "1", "memory": "1Gi"}
    described = Cluster(namespace="n", image="i:1", claim="c", requests=bounds, limits=bounds)
    return KubernetesRunner(tmp_path / "jobs", tmp_path / "templates", described)


def test_there_is_no_runner_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="no cluster: .* Set KUBECONFIG"):
        a_runner(tmp_path)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigurationError, match=r"--runner kubernetes: .*penstock-rl\[kubernetes\]"):
        a_runner(tmp_path)
