"""The component `ranks`: a learner of several pods, as an overlay of somebody's own would have it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from torch.distributed.run import get_args_parser

from tests.deploy import command_line
from tests.deploy.custom_resources import KINDS
from tests.deploy.manifests import ROOT, Object, Workload, kinds, needs_kubectl, render, selects, workloads

pytestmark = needs_kubectl


@cache
def rendered(folder: Path) -> tuple[Object, ...]:
    """Three pods with two GPUs each, by the overlay of docs/ranks.md."""
    folder.mkdir()
    page = (ROOT / "docs" / "ranks.md").read_text()
    (block,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", page, re.DOTALL)
    here = "../" * (len(folder.parts) - 1) + str(ROOT.relative_to("/"))
    (folder / "kustomization.yaml").write_text(block.replace("penstock/deploy/", f"{here}/deploy/"))
    return render(folder)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    return rendered(tmp_path_factory.mktemp("overlay") / "ranks")


def learner(objects: tuple[Object, ...]) -> Workload:
    (found,) = [workload for workload in workloads(objects) if workload.name == "learner"]
    return found


def test_every_object_is_valid(objects: tuple[Object, ...]) -> None:
    for one in objects:
        if one["kind"] not in KINDS:
            kubernetes_validate.validate(one, "1.30", strict=True)


def test_torchrun_starts_the_same_learner_in_every_pod(objects: tuple[Object, ...]) -> None:
    workload = learner(objects)
    (container,) = workload.spec["containers"]
    environment = {one["name"]: one.get("value", "of a secret") for one in container["env"]}
    assert int(environment["PODS"]) == workload.replicas == 3
    assert environment["RANKS_PER_POD"] == container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    words = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in container["args"]]
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend) == ("3", "2", "c10d")
    assert parsed.no_python
    assert parsed.shutdown_timeout < workload.spec["terminationGracePeriodSeconds"]
    assert (container["command"], parsed.training_script) == (["torchrun"], "penstock")
    assert environment["PENSTOCK_LEARNER__PLAINTEXT_RANKS"] == "true"
    command_line.check(parsed.training_script_args, environment)
    assert {"--resume", "--stay"} <= set(parsed.training_script_args)


def test_ranks_find_one_another_before_they_are_ready(objects: tuple[Object, ...]) -> None:
    (container,) = learner(objects).spec["containers"]
    assert "--rdzv-endpoint=learner-0.learner:29400" in container["args"]
    (service,) = [one for one in kinds(objects, "Service") if one["metadata"]["name"] == "learner"]
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_only_ranks_talk_to_ranks(objects: tuple[Object, ...]) -> None:
    labels = learner(objects).labels
    for policy in kinds(objects, "NetworkPolicy"):
        if policy["metadata"]["name"] == "ranks":
            (inside,), (outside,) = policy["spec"]["ingress"], policy["spec"]["egress"]
            assert [_only(side) for side in (*inside["from"], *outside["to"])] == ["learner", "learner"]
        elif selects(policy["spec"]["podSelector"], labels) and policy["spec"].get("ingress"):
            assert policy["metadata"]["name"] == "metrics"


def _only(side: dict[str, Any]) -> str:
    assert side.keys() == {"podSelector"}
    (label,) = side["podSelector"]["matchLabels"].values()
    return str(label)
