"""What no pod of an overlay may do, and what it must say."""

import re
from typing import Any

import pytest

from tests.deploy.manifests import (
    COMPONENT,
    OVERLAYS,
    ROOT,
    Object,
    Workload,
    all_containers,
    kinds,
    name_of,
    needs_kubectl,
    overlay,
    selects,
    workloads,
)
from tests.deploy.node.network import lets_in
from tests.deploy.node.prometheus import IDENTITY

pytestmark = needs_kubectl
of_runs = pytest.mark.parametrize("name", OVERLAYS)
of_all = pytest.mark.parametrize("name", [*OVERLAYS, "gateway"])

OWN_FILES = {"own.pem", "own.key", "authority.pem"}
"""Certificate, key and authority, which every pod of a run has."""
PASSWORDS = {
    "redis": {"users.acl", "redis-operator.password"},
    "broker": {"redis.password", "registry.password"},
    "learner": {"redis.password", "registry.password"},
    "server": {"registry.password"},
}
"""What else a role is shown."""
SIGNERS = {"evaluator": "actor"}
"""Whose certificate a role has, where it is not its own."""
SECRET_WORDS = re.compile(r"PASSWORD|TOKEN|SECRET|KEY|CREDENTIAL", re.IGNORECASE)
PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s]*:[^/\s$]+@")
OF_RESTRICTED = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
"""Volumes that the restricted profile allows and that are used here: no path of the node."""


@of_all
def test_the_namespace_enforces_the_restricted_profile(name: str) -> None:
    (namespace,) = kinds(overlay(name), "Namespace")
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


@of_all
def test_pods_run_without_privileges_and_token(name: str) -> None:
    for workload in workloads(overlay(name)):
        spec = workload.spec
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, workload.name
        assert context["runAsUser"] >= 10_000, workload.name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, workload.name
        assert spec["automountServiceAccountToken"] is False, workload.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), workload.name
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= OF_RESTRICTED, (workload.name, volume)


@of_all
def test_accounts_have_no_token_and_no_rights(name: str) -> None:
    objects = overlay(name)
    accounts = kinds(objects, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    assert {w.spec["serviceAccountName"] for w in workloads(objects)} == {
        a["metadata"]["name"] for a in accounts
    }
    assert kinds(objects, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []


@pytest.mark.promise("pod-privileges-token-writable")
@of_all
def test_containers_have_no_privilege_and_no_writable_root(name: str) -> None:
    for label, container in all_containers(overlay(name)):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, label
        assert context["readOnlyRootFilesystem"] is True, label
        assert context["capabilities"] == {"drop": ["ALL"]}, label
        assert context.keys() == {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}, label


@of_all
def test_containers_have_requests_and_limits(name: str) -> None:
    for label, container in all_containers(overlay(name)):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        for key in ("cpu", "memory"):
            assert 0 < _amount(requests[key]) <= _amount(limits[key]), label


def _amount(text: str) -> float:
    units = {"m": 1e-3, "": 1.0, "Mi": 2.0**20, "Gi": 2.0**30}
    match = re.fullmatch(r"([0-9.]+)(m|Mi|Gi|)", text)
    assert match is not None, text
    return float(match[1]) * units[match[2]]


@of_all
def test_temporary_volumes_are_bounded(name: str) -> None:
    for workload in workloads(overlay(name)):
        for volume in workload.spec["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], (workload.name, volume["name"])


@of_all
def test_servers_have_probes(name: str) -> None:
    for workload in filter(lambda w: w.serves and w.replicas, workloads(overlay(name))):
        (container,) = workload.spec["containers"]
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        if "httpGet" not in probes[0]:
            assert all("exec" in probe for probe in probes), workload.name
            continue
        paths = [probe["httpGet"]["path"] for probe in probes]
        assert paths == ["/healthz", "/readyz", "/healthz"], workload.name
        assert {probe["httpGet"]["port"] for probe in probes} == {"metrics"}, workload.name


@of_all
def test_images_have_a_version(name: str) -> None:
    for label, container in all_containers(overlay(name)):
        tag = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[2]
        assert tag, label
        assert tag != "latest", label


@of_all
def test_the_manifests_hold_no_secret(name: str) -> None:
    objects = overlay(name)
    for label, container in all_containers(objects):
        for variable in container.get("env", ()):
            if "value" in variable and SECRET_WORDS.search(variable["name"]):
                assert variable["value"].startswith("/certificates/"), (label, variable["name"])
        words = " ".join([*container.get("command", ()), *container.get("args", ())])
        assert not PASSWORD_IN_ADDRESS.search(words), label
    for one in kinds(objects, "ConfigMap"):
        assert not PASSWORD_IN_ADDRESS.search("\n".join(one["data"].values())), name_of(one)
    for secret in kinds(objects, "Secret"):
        assert secret["data"].keys() == {"url"}, name_of(secret)


MADE = "made"
"""The folder of the volume that says whether certificates are made, and holds nothing else."""


def _certificate_files(workload: Workload) -> dict[str, str]:
    """What the containers of a pod that stay are shown one by one: the file's own name by that in the pod."""
    mounts = [mount for container in workload.spec["containers"] for mount in container["volumeMounts"]]
    return {
        mount["mountPath"].rpartition("/")[2]: mount["subPath"]
        for mount in mounts
        if mount["name"] == "certificates" and "subPath" in mount and mount["subPath"] != MADE
    }


@of_runs
def test_a_pod_that_shares_a_volume_mounts_only_its_own_files(name: str) -> None:
    roles = {"redis", "broker", "learner", "actor", "evaluator", "server", "operator"}
    for workload in workloads(overlay(name)):
        role, files = workload.labels[COMPONENT], _certificate_files(workload)
        (volume,) = [one for one in workload.spec["volumes"] if one["name"] == "certificates"] or [{}]
        if role in roles and "persistentVolumeClaim" in volume:
            assert files.keys() == OWN_FILES | PASSWORDS.get(role, set()), role
            owner = SIGNERS.get(role, role)
            assert {files[own] for own in OWN_FILES} == {f"{owner}.pem", f"{owner}.key", "authority.pem"}, (
                role
            )
            of_redis = f"redis-{role}.password"
            assert files.get("redis.password", of_redis) == of_redis, role


@of_runs
def test_only_the_job_mounts_the_whole_volume_of_certificates(name: str) -> None:
    for workload in workloads(overlay(name)):
        shared = {one["name"] for one in workload.spec["volumes"] if "persistentVolumeClaim" in one}
        for label, container in workload.containers():
            for mount in container.get("volumeMounts", ()):
                if mount["name"] == "certificates" and "certificates" in shared:
                    is_makers = workload.name == "certificates"
                    assert is_makers or mount.get("subPath", "authority.key") != "authority.key", label
                    renews = workload.name == "operator" and mount.get("subPath") == MADE
                    assert is_makers or renews or mount["readOnly"] is True, label


@of_runs
def test_the_page_names_the_pods_to_restart_for_new_certificates(name: str) -> None:
    pods = workloads(overlay(name))
    frozen = {workload.name for workload in pods if _certificate_files(workload)}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    paragraph = page.partition("**A certificate is renewed.**")[2].partition("\n**")[0]
    (sentence,) = [one for one in paragraph.split(". ") if "`subPath`" in one]
    assert (f"`{name}`" in sentence) == bool(frozen), sentence
    assert {w.kind for w in pods if w.name in frozen} <= {"StatefulSet", "Deployment"}, frozen
    assert "rollout restart statefulset,deployment" in paragraph
    assert "`subPath`" in (ROOT / "SECURITY.md").read_text().partition("*Rotation*")[2].partition("\n\n")[0]


@of_all
def test_everything_is_denied_first(name: str) -> None:
    (policy,) = [
        one for one in kinds(overlay(name), "NetworkPolicy") if one["metadata"]["name"] == "default-deny"
    ]
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.promise("pod-privileges-token-writable")
@of_runs
def test_exactly_the_needed_paths_are_open(name: str) -> None:
    objects = overlay(name)
    pods = workloads(objects)
    policies = kinds(objects, "NetworkPolicy")
    open_paths = {
        (one.name, other.name, port["name"])
        for one in pods
        for other in pods
        for _, container in other.containers()
        for port in container.get("ports", ())
        if _allows(policies, "egress", one, other, port["name"])
        and _allows(policies, "ingress", other, one, port["name"])
    }
    wanted = {(one, "broker", "grpc") for one in ("actor", "evaluator", "server")}
    wanted |= {(one, "redis", "redis") for one in ("broker", "learner")}
    if name in {"local", "gpu"}:
        wanted |= {(one, "registry", "postgresql") for one in ("broker", "learner", "server")}
        wanted |= {("operator", "broker", "grpc")}
    assert open_paths == wanted


def _allows(policies: list[Object], way: str, pod: Workload, peer: Workload, port: str) -> bool:
    """Whether a policy of `pod` allows traffic to (egress) or from (ingress) `peer` on a named port."""
    for policy in policies:
        if not selects(policy["spec"]["podSelector"], pod.labels):
            continue
        for rule in policy["spec"].get(way, ()):
            sides = rule["to" if way == "egress" else "from"]
            if any(_is_side(side, peer) for side in sides) and any(p["port"] == port for p in rule["ports"]):
                return True
    return False


def _is_side(side: dict[str, Any], peer: Workload) -> bool:
    """Peers of the same namespace only: others are looked at below."""
    return (
        "podSelector" in side
        and "namespaceSelector" not in side
        and selects(side["podSelector"], peer.labels)
    )


@of_runs
def test_paths_from_outside_the_namespace_are_listed(name: str) -> None:
    objects = overlay(name)
    seen = set()
    for policy in kinds(objects, "NetworkPolicy"):
        for way, sides in (("egress", "to"), ("ingress", "from")):
            for rule in policy["spec"].get(way, ()):
                for side in rule[sides]:
                    if side.keys() != {"podSelector"}:
                        assert rule["ports"], policy["metadata"]["name"]
                        assert "ipBlock" in side or side["podSelector"]["matchLabels"], policy["metadata"][
                            "name"
                        ]
                        seen.add((policy["metadata"]["name"], way))
    wanted = {("names", "egress"), ("server", "ingress")}
    if name in {"plain", "production"}:
        wanted.add(("to-registry", "egress"))
    if name == "production":
        wanted.add(("metrics", "ingress"))
    assert seen == wanted


@of_runs
def test_prometheus_reaches_only_metrics(name: str) -> None:
    objects = overlay(name)
    ports = {
        (workload.name, port["name"])
        for workload in workloads(objects)
        for _, container in workload.containers()
        for port in container.get("ports", ())
        if lets_in(objects, workload.labels, port["name"], IDENTITY)
    }
    watched = {"actor", "broker", "evaluator", "learner", "server"} if name == "production" else set()
    assert ports == {(one, "metrics") for one in watched}


@of_runs
def test_every_pod_is_of_a_known_component(name: str) -> None:
    known = {"redis", "broker", "learner", "actor", "evaluator", "server"}
    inside = {"registry", "certificates", "operator"} if name in {"local", "gpu"} else set()
    assert {w.labels[COMPONENT] for w in workloads(overlay(name))} == known | inside
