"""Trainings of the gateway on a cluster: the component beside the overlay, and the Job of a training."""

import json
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from penstock.launch.gateway.kubernetes_runner import Cluster, job_object, name_of, read_cluster, selector
from tests.deploy.command_line import parsed
from tests.deploy.manifests import COMPONENT, KUBERNETES, Workload, kinds, needs_kubectl, render, workloads
from tests.deploy.manifests import name_of as called
from tests.deploy.test_gateway_objects import NAMESPACE, allows

pytestmark = needs_kubectl

COMPONENT_FOLDER: Final = KUBERNETES / "components" / "gateway-jobs"
JOB: Final = "0123456789abcdef01234567"
USED: Final = {("batch", "jobs"): {"create", "list", "delete"}, ("", "pods"): {"list"}}
"""What the runner asks of a cluster."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    folder = tmp_path_factory.mktemp("trainings")
    here = Path("../" * (len(folder.resolve().parts) - 1)) / KUBERNETES.relative_to("/")
    told = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [str(here / "overlays" / "gateway")],
        "components": [str(here / "components" / "gateway-jobs")],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(told))
    return render(folder)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return read_cluster(COMPONENT_FOLDER / "cluster.toml")


@pytest.fixture
def job(cluster: Cluster) -> dict[str, Any]:
    return job_object(
        cluster,
        job=JOB,
        place="p1",
        folder=Path("/state/jobs") / JOB,
        command=["python"],
        owner=("alpha", "a-"),
    )


def workload_of(job: dict[str, Any]) -> Workload:
    name, template = job["metadata"]["name"], job["spec"]["template"]
    return Workload(kind="Job", name=name, replicas=1, template=template)


def test_every_object_is_valid_and_of_the_namespace(
    objects: tuple[dict[str, Any], ...], job: dict[str, Any]
) -> None:
    for one in (*objects, job):
        kubernetes_validate.validate(one, "1.30", strict=True)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == NAMESPACE, called(one)


def test_the_gateway_may_do_what_its_runner_does_and_no_more(objects: tuple[dict[str, Any], ...]) -> None:
    (role,) = kinds(objects, "Role")
    found = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert found == USED
    (binding,) = kinds(objects, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "gateway", "namespace": NAMESPACE}]
    assert kinds(objects, "ClusterRole", "ClusterRoleBinding") == []
    with_token = [one.name for one in workloads(objects) if one.spec["automountServiceAccountToken"]]
    assert with_token == ["gateway"]


def test_a_training_has_no_privilege_and_a_bound_on_everything(job: dict[str, Any]) -> None:
    assert (job["spec"]["backoffLimit"], job["spec"]["template"]["spec"]["restartPolicy"]) == (0, "Never")
    pod = workload_of(job)
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False
    ((label, container),) = pod.containers()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for bound in ("requests", "limits"):
        assert {"cpu", "memory"} <= container["resources"][bound].keys(), label
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    assert (mounts["jobs"]["subPath"], mounts["jobs"]["mountPath"]) == (f"jobs/{JOB}", f"/state/jobs/{JOB}")
    assert [one for one in container["env"] if "PASSWORD" in one["name"] and "value" in one] == []


def test_what_a_training_names_is_there(
    objects: tuple[dict[str, Any], ...], job: dict[str, Any], cluster: Cluster
) -> None:
    there = {called(one) for one in objects}
    assert {f"PersistentVolumeClaim/{cluster.claim}", f"ServiceAccount/{cluster.service_account}"} <= there
    (gateway,) = [one for one in workloads(objects) if one.name == "gateway"]
    volumes = {one["name"]: one for one in gateway.spec["volumes"]}
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == cluster.claim
    ((_, container),) = gateway.containers()
    passwords = [one["valueFrom"] for one in container["env"] if "PASSWORD" in one["name"]]
    secrets = {one["secretKeyRef"]["name"] for one in passwords}
    assert secrets == {cluster.registry_secret}
    (claim,) = kinds(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    labels = job["metadata"]["labels"]
    assert dict(pair.split("=") for pair in selector("p1").split(",")).items() <= labels.items()
    assert job["metadata"]["name"] == name_of(JOB)


def test_the_gateway_s_words_are_known_and_read_what_is_mounted(objects: tuple[dict[str, Any], ...]) -> None:
    (gateway,) = [one for one in workloads(objects) if one.name == "gateway"]
    ((_, container),) = gateway.containers()
    context = parsed(["gateway", *container["args"]])
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    places = [str(context.params[name]) for name in ("state", "templates")]
    places.append(str(Path(context.params["cluster"]).parent))
    assert set(places) <= mounted
    maps = {one["metadata"]["name"].partition("-")[0]: one for one in kinds(objects, "ConfigMap")}
    described = maps["cluster"]
    assert described["data"]["cluster.toml"] == (COMPONENT_FOLDER / "cluster.toml").read_text()


def test_trainings_reach_the_database_and_nothing_else_inside(
    objects: tuple[dict[str, Any], ...], job: dict[str, Any]
) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in kinds(objects, "NetworkPolicy")}
    inside = {name: spec for name, spec in policies.items() if name != "to-api-server"}
    pods = [*workloads(objects), workload_of(job)]
    paths = {
        (one.labels[COMPONENT], other.labels[COMPONENT])
        for one in pods
        for other in pods
        if allows(inside, "egress", one, other) and allows(inside, "ingress", other, one)
    }
    assert paths == {("gateway", "database"), ("migration", "database"), ("training", "database")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (to_server,) = policies["to-api-server"]["egress"]
    assert [one["port"] for one in to_server["ports"]] == [443, 6443]
