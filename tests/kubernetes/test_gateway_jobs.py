"""The gateway's runner on a real cluster: what its API server accepts, and where a job is by what it says.

The folder of the jobs is one of the tests' own machine, which no pod sees, so that no training begins here:
its pod finds no folder of its job, or is held back by what the test takes away.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

pytest.importorskip("argon2", reason="the gateway needs its extra")
pytest.importorskip("kubernetes", reason="a cluster needs its extra")

from penstock.gateway.jobs.job_records import Outcome, Stage
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.kubernetes_runner import Cluster as Described
from penstock.launch.gateway.kubernetes_runner import KubernetesRunner, job_object, name_of, read_cluster
from tests.deploy.manifests import KUBERNETES, kinds, overlay, render
from tests.kubernetes.cluster import Cluster, eventually
from tests.kubernetes.installation import Installation
from tests.kubernetes.test_strict_validation import with_namespace
from tests.support.gateway.job_templates import taken_job, write_templates

COMPONENT: Final = KUBERNETES / "components" / "gateway-jobs"
NO_IMAGE: Final = "penstock-there-is-no-such-image:0"


@pytest.fixture
def installation(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    yield from with_namespace(Installation(cluster, tmp_path / "overlay", "gateway", "gateway-jobs"))


@pytest.fixture
def described(installation: Installation) -> Described:
    """Where jobs run: in that namespace, under an account without rights, on a claim of its class."""
    beside = kinds(overlay("trainings"), "ServiceAccount", "Role", "RoleBinding")
    for one in [*kinds(render(installation.folder), "ServiceAccount"), *beside]:
        text = re.sub("penstock-(trainings|gateway)", installation.namespace, yaml.safe_dump(one))
        installation.kubectl("apply", "--validate=strict", "--filename=-", given=text)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "state"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    installation.kubectl("apply", "--filename=-", given=yaml.safe_dump(claim))
    base = read_cluster(COMPONENT / "cluster.toml")
    amounts = {"cpu": "10m", "memory": "32Mi"}
    told = {"namespace": installation.namespace, "image": NO_IMAGE, "registry_secret": None, "start_s": 1}
    return base.model_copy(update=told | {"requests": amounts, "limits": amounts})


@pytest.fixture
def runners(
    described: Described, installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], KubernetesRunner]:
    monkeypatch.setenv("KUBECONFIG", str(installation.cluster.kubeconfig))
    write_templates(tmp_path / "templates")
    return lambda: KubernetesRunner(tmp_path / "jobs", tmp_path / "templates", described)


def test_the_job_of_a_training_is_accepted(installation: Installation) -> None:
    base = read_cluster(COMPONENT / "cluster.toml")
    described = base.model_copy(update={"namespace": installation.namespace})
    folder = Path("/state/jobs/0123")
    one = job_object(described, job="0123", place="p", folder=folder, command=["python"])
    words = ["apply", "--validate=strict", "--dry-run=server", "--filename=-"]
    said = installation.kubectl(*words, given=yaml.safe_dump(one), check=False)
    assert said.strip() == f"job.batch/{name_of('0123')} created (server dry run)"


def test_the_gateways_account_is_allowed_what_its_runner_does(
    installation: Installation, described: Described
) -> None:
    account = f"--as=system:serviceaccount:{described.namespace}:gateway"

    def may(*words: str) -> bool:
        return installation.kubectl("auth", "can-i", *words, account, check=False).strip().startswith("yes")

    assert all(may(verb, "jobs.batch") for verb in ("create", "list", "delete"))
    assert may("list", "pods")
    for refused in (
        ("get", "secrets"),
        ("get", "pods"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("update", "jobs.batch"),
    ):
        assert not may(*refused), refused


def test_a_job_is_created_once_found_again_and_removed(
    installation: Installation, runners: Callable[[], KubernetesRunner]
) -> None:
    runner, one = runners(), taken_job()
    assert runner.find(one.id) is Stage.NOT_BEGUN
    runner.begin(one, {})
    runners().begin(one, {})
    assert runners().find(one.id) is Stage.GOING_ON

    def made() -> list[Any]:
        words = ["jobs", f"--namespace={installation.namespace}"]
        return list(installation.cluster.get(*words)["items"])

    assert [job["metadata"]["name"] for job in made()] == [name_of(one.id)]

    def ended() -> Outcome | None:
        found = runners().find(one.id)
        return found if isinstance(found, Outcome) else None

    outcome = eventually("a job whose image is none has failed", ended)
    assert (outcome.state, outcome.cause.startswith("its image cannot be pulled")) == (JobState.FAILED, True)
    eventually("its Job is gone", lambda: True if made() == [] else None)
    assert runners().find(one.id) == outcome


def test_a_job_that_is_cancelled_is_gone(
    installation: Installation, runners: Callable[[], KubernetesRunner]
) -> None:
    runner, one = runners(), taken_job()
    assert runner.stop(one.id) is False
    runner.begin(one, {})
    assert runner.stop(one.id) is True
    eventually("it is gone", lambda: True if runners().find(one.id) is Stage.NOT_BEGUN else None)
