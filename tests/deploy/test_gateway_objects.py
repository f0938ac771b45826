"""The overlay of a gateway: valid, closed, without a secret in it, and its commands are known."""

import re
from ipaddress import ip_network
from typing import Any, Final

import kubernetes_validate
import pytest

from penstock.config.settings import from_environment, load
from penstock.gateway.frame.envelope import Doors
from tests.deploy.command_line import parsed
from tests.deploy.manifests import (
    COMPONENT,
    KUBERNETES,
    Workload,
    all_containers,
    kinds,
    name_of,
    needs_kubectl,
    render,
    selects,
    workloads,
)

pytestmark = needs_kubectl

NAMESPACE: Final = "penstock-gateway"
SECRETS: Final = {"keys", "database"}
"""That the operator makes."""
LEAST_PREFIX: Final = 16


@pytest.fixture(scope="module")
def objects() -> tuple[dict[str, Any], ...]:
    return render(KUBERNETES / "overlays" / "gateway")


def test_every_object_is_valid_and_of_the_namespace(objects: tuple[dict[str, Any], ...]) -> None:
    names = [name_of(one) for one in objects]
    assert sorted(set(names)) == sorted(names)
    for one in objects:
        kubernetes_validate.validate(one, "1.30", strict=True)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == NAMESPACE, name_of(one)


def test_what_is_named_is_there(objects: tuple[dict[str, Any], ...]) -> None:
    there = {name_of(one) for one in objects}
    secrets = set()
    for workload in workloads(objects):
        assert f"ServiceAccount/{workload.spec['serviceAccountName']}" in there
        claims = {claim["metadata"]["name"] for claim in workload.claims}
        volumes = {volume["name"] for volume in workload.spec["volumes"]} | claims
        secrets |= {one["secret"]["secretName"] for one in workload.spec["volumes"] if "secret" in one}
        for label, container in workload.containers():
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, label
            for variable in container.get("env", ()):
                if "valueFrom" not in variable:
                    assert "PASSWORD" not in variable["name"], label
                    continue
                ((kind, source),) = variable["valueFrom"].items()
                if kind == "secretKeyRef":
                    secrets.add(source["name"])
                else:
                    assert f"ConfigMap/{source['name']}" in there, label
    assert secrets == SECRETS
    assert kinds(objects, "Secret") == []


def test_no_password_stands_in_an_address(objects: tuple[dict[str, Any], ...]) -> None:
    (addresses,) = kinds(objects, "ConfigMap")
    words = [word for _, one in all_containers(objects) for word in one.get("args", ())]
    for text in (*words, *addresses["data"].values()):
        assert not re.search(r"://[^/\s]*:[^/\s$]+@", text), text


def test_commands_and_settings_are_known(objects: tuple[dict[str, Any], ...]) -> None:
    ours = [one for _, one in all_containers(objects) if one.get("command", [])[:1] == ["penstock"]]
    found = []
    for container in ours:
        assert container["image"].startswith("penstock-gateway:")
        words = [*container["command"][1:], *container.get("args", ())]
        context = parsed(words)
        found.append(context.command.name)
        load([from_environment({})])
        assert context.params["database"] == "$(DATABASE)"
    assert sorted(found) == ["gateway", "migrate"]


def test_pods_have_no_privilege(objects: tuple[dict[str, Any], ...]) -> None:
    for workload in workloads(objects):
        assert workload.spec["securityContext"]["runAsNonRoot"] is True
        assert workload.spec["automountServiceAccountToken"] is False
        for volume in workload.spec["volumes"]:
            assert "secret" in volume or volume["emptyDir"]["sizeLimit"], volume
        for label, container in workload.containers():
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, label
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, label
            assert container["resources"].keys() == {"requests", "limits"}, label
            assert container["image"].rpartition(":")[2] not in {"", "latest"}, label


def test_only_the_paths_to_the_database_are_open_inside(objects: tuple[dict[str, Any], ...]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in kinds(objects, "NetworkPolicy")}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    pods = workloads(objects)
    paths = {
        (one.labels[COMPONENT], other.labels[COMPONENT])
        for one in pods
        for other in pods
        if allows(policies, "egress", one, other) and allows(policies, "ingress", other, one)
    }
    assert paths == {("gateway", "database"), ("migration", "database")}
    (people, prometheus) = policies["gateway"]["ingress"]
    assert people["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert prometheus["ports"] == [{"protocol": "TCP", "port": "metrics"}]


def allows(policies: dict[str, Any], way: str, pod: Workload, peer: Workload) -> bool:
    return any(
        selects(spec["podSelector"], pod.labels) and selects(side["podSelector"], peer.labels)
        for spec in policies.values()
        for rule in spec.get(way, ())
        for side in rule["to" if way == "egress" else "from"]
        if side.keys() == {"podSelector"}
    )


def test_the_service_leads_to_the_gateway(objects: tuple[dict[str, Any], ...]) -> None:
    for service in kinds(objects, "Service"):
        (workload,) = [
            one for one in workloads(objects) if service["spec"]["selector"].items() <= one.labels.items()
        ]
        ports = {port["name"] for _, one in workload.containers() for port in one.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_who_calls_is_told_by_the_ingress_alone(objects: tuple[dict[str, Any], ...]) -> None:
    (settings,) = kinds(objects, "ConfigMap")
    (gateway,) = [one for _, one in all_containers(objects) if "--proxy=$(PROXY)" in one.get("args", ())]
    named = {
        one["name"]: one["valueFrom"]["configMapKeyRef"]["key"]
        for one in gateway["env"]
        if "configMapKeyRef" in one["valueFrom"]
    }
    assert named["PROXY"] == "PROXY"
    network = ip_network(settings["data"]["PROXY"])
    assert network.is_private
    assert network.prefixlen >= LEAST_PREFIX, "who has an address of it may say that others call"
    Doors(hosts=frozenset({settings["data"]["HOST"]}), proxies=(str(network),))
