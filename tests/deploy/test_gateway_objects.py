"""The overlay of a gateway, the component for its trainings on a cluster, and the Job of a training."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from penstock.gateway.frame.envelope import Doors
from penstock.launch.gateway.kubernetes_runner import Cluster, job_object, name_of, read_cluster, selector
from tests.deploy.manifests import (
    COMPONENT,
    KUBERNETES,
    Object,
    Workload,
    all_containers,
    check_command,
    kinds,
    needs_kubectl,
    overlay,
    render,
    selects,
    with_components,
    workloads,
)
from tests.deploy.manifests import name_of as called

pytestmark = needs_kubectl

NAMESPACE: Final = "penstock-gateway"
TRAININGS: Final = "penstock-trainings"
LEAST_PREFIX: Final = 16
COMPONENT_FOLDER: Final = KUBERNETES / "components" / "gateway-jobs"
JOB: Final = "0123456789abcdef01234567"
USED: Final = {("batch", "jobs"): {"create", "list", "delete"}, ("", "pods"): {"list"}}
"""What the runner asks of a cluster."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    """The gateway with the component, as an operator's own overlay renders them."""
    folder = tmp_path_factory.mktemp("overlay") / "own"
    return render(with_components(folder, "gateway-jobs", base="gateway", namespace=NAMESPACE))


@pytest.fixture(scope="module")
def beside() -> tuple[Object, ...]:
    """The namespace of the trainings."""
    return overlay("trainings")


@pytest.fixture(scope="module")
def gateway(objects: tuple[Object, ...]) -> Workload:
    (found,) = [one for one in workloads(objects) if one.name == "gateway"]
    return found


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return read_cluster(COMPONENT_FOLDER / "cluster.toml")


@pytest.fixture
def job(cluster: Cluster) -> dict[str, Any]:
    folder, owner = Path("/state/jobs") / JOB, ("alpha", "a-")
    return job_object(cluster, job=JOB, place="p1", folder=folder, command=["python"], owner=owner)


def workload_of(job: dict[str, Any]) -> Workload:
    name, template = job["metadata"]["name"], job["spec"]["template"]
    return Workload(kind="Job", name=name, replicas=1, template=template)


def open_paths(objects: tuple[Object, ...], pods: list[tuple[str, Workload]]) -> set[tuple[str, str]]:
    """Components, one of which reaches the other. pods: with their namespaces."""

    def names(side: dict[str, Any], own: str, namespace: str) -> bool:
        labels = {"kubernetes.io/metadata.name": namespace}
        return selects(side["namespaceSelector"], labels) if "namespaceSelector" in side else own == namespace

    def allows(way: str, at: str, pod: Workload, peer_at: str, peer: Workload) -> bool:
        return any(
            selects(one["spec"]["podSelector"], pod.labels)
            and names(side, at, peer_at)
            and selects(side["podSelector"], peer.labels)
            for one in kinds(objects, "NetworkPolicy")
            if one["metadata"]["namespace"] == at
            for rule in one["spec"].get(way, ())
            for side in rule.get("to" if way == "egress" else "from", ())
        )

    return {
        (one.labels[COMPONENT], other.labels[COMPONENT])
        for at, one in pods
        for there, other in pods
        if allows("egress", at, one, there, other) and allows("ingress", there, other, at, one)
    }


def test_only_paths_to_the_database_are_open_inside_the_cluster() -> None:
    objects = overlay("gateway")
    policies = {one["metadata"]["name"]: one["spec"] for one in kinds(objects, "NetworkPolicy")}
    assert open_paths(objects, [(NAMESPACE, one) for one in workloads(objects)]) == {
        ("gateway", "database"),
        ("migration", "database"),
    }
    (people, prometheus) = policies["gateway"]["ingress"]
    assert people["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert prometheus["ports"] == [{"protocol": "TCP", "port": "metrics"}]


def test_the_gateway_believes_only_the_ingress_about_callers() -> None:
    objects = overlay("gateway")
    (settings,) = kinds(objects, "ConfigMap")
    (container,) = [one for _, one in all_containers(objects) if "--proxy=$(PROXY)" in one.get("args", ())]
    named = {
        one["name"]: one["valueFrom"]["configMapKeyRef"]["key"]
        for one in container["env"]
        if "configMapKeyRef" in one["valueFrom"]
    }
    assert named["PROXY"] == "PROXY"
    network = ip_network(settings["data"]["PROXY"])
    assert network.is_private
    assert network.prefixlen >= LEAST_PREFIX, "who has an address of it may say that others call"
    Doors(hosts=frozenset({settings["data"]["HOST"]}), proxies=(str(network),))


def test_the_account_of_the_gateway_has_the_rights_of_its_runner_where_no_secret_of_its_own_is(
    objects: tuple[Object, ...], beside: tuple[Object, ...], cluster: Cluster
) -> None:
    for one in beside:
        kubernetes_validate.validate(one, "1.30", strict=True)
    assert kinds(objects, "Role", "RoleBinding") == []
    assert {one["metadata"]["namespace"] for one in beside if one["kind"] != "Namespace"} == {TRAININGS}
    assert cluster.namespace == TRAININGS
    (role,) = kinds(beside, "Role")
    found = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert found == USED
    (binding,) = kinds(beside, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "gateway", "namespace": NAMESPACE}]
    assert kinds((*objects, *beside), "ClusterRole", "ClusterRoleBinding") == []
    with_token = [one.name for one in workloads(objects) if one.spec["automountServiceAccountToken"]]
    assert with_token == ["gateway"]


def test_a_training_has_no_privilege_and_a_bound_on_everything(job: dict[str, Any]) -> None:
    kubernetes_validate.validate(job, "1.30", strict=True)
    assert job["metadata"]["namespace"] == TRAININGS
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


def test_the_overlays_have_what_a_training_names(
    objects: tuple[Object, ...],
    beside: tuple[Object, ...],
    gateway: Workload,
    job: dict[str, Any],
    cluster: Cluster,
) -> None:
    there = {called(one) for one in beside}
    assert {f"PersistentVolumeClaim/{cluster.claim}", f"ServiceAccount/{cluster.service_account}"} <= there
    volumes = {one["name"]: one for one in gateway.spec["volumes"]}
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == cluster.claim
    ((_, container),) = gateway.containers()
    passwords = [one["valueFrom"] for one in container["env"] if "PASSWORD" in one["name"]]
    secrets = {one["secretKeyRef"]["name"] for one in passwords}
    assert secrets == {cluster.registry_secret}
    claims = kinds((*objects, *beside), "PersistentVolumeClaim")
    assert [one["spec"]["accessModes"] for one in claims] == [["ReadWriteMany"]] * 2
    assert claims[0]["spec"] == claims[1]["spec"]
    (address,) = [one["data"]["DATABASE"] for one in kinds(objects, "ConfigMap") if "DATABASE" in one["data"]]
    (service,) = kinds(beside, "Service")
    assert f"@{service['metadata']['name']}:" in address
    assert service["spec"]["externalName"] == f"database.{NAMESPACE}.svc.cluster.local"
    labels = job["metadata"]["labels"]
    assert dict(pair.split("=") for pair in selector("p1").split(",")).items() <= labels.items()
    assert job["metadata"]["name"] == name_of(JOB)


def test_the_gateway_reads_files_that_are_mounted(objects: tuple[Object, ...], gateway: Workload) -> None:
    ((_, container),) = gateway.containers()
    params = check_command({**container, "command": ["penstock", "gateway"]}).params
    assert params["database"] == "$(DATABASE)"
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {str(params["state"]), str(params["templates"]), str(Path(params["cluster"]).parent)} <= mounted
    maps = {one["metadata"]["name"].partition("-")[0]: one for one in kinds(objects, "ConfigMap")}
    assert maps["cluster"]["data"]["cluster.toml"] == (COMPONENT_FOLDER / "cluster.toml").read_text()


def test_trainings_reach_only_the_database_inside_the_cluster(
    objects: tuple[Object, ...], beside: tuple[Object, ...], job: dict[str, Any]
) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in kinds(objects, "NetworkPolicy")}
    pods = [*((NAMESPACE, one) for one in workloads(objects)), (TRAININGS, workload_of(job))]
    assert open_paths((*objects, *beside), pods) == {
        ("gateway", "database"),
        ("migration", "database"),
        ("training", "database"),
    }
    denied = [one["spec"] for one in kinds((*objects, *beside), "NetworkPolicy") if "deny" in called(one)]
    assert denied == [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}] * 2
    (to_server,) = policies["to-api-server"]["egress"]
    assert [one["port"] for one in to_server["ports"]] == [443, 6443]
