"""A job as an object of Kubernetes: one pod, once, without privilege, on its folder of the shared claim."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launch.gateway.cluster_file import Cluster

JOB_LABEL: Final = "penstock/job"
PLACE_LABEL: Final = "penstock/place"
MANAGER: Final = "penstock-gateway"
USER: Final = 65532
"""That of the images: gateway and trainings write the same folders."""
KEPT_S: Final = 7 * 24 * 3600
"""How long a Job that has ended can be looked at in the cluster, in seconds; its folder stays."""
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod's own
_TMP_BYTES: Final = "2Gi"


def name_of(job: str) -> str:
    """Return the name of a job's object: the same for the same job, so that it is there once."""
    return f"penstock-{job}"


def selector(place: str) -> str:
    """Return the label selector of all objects of a place."""
    return f"app.kubernetes.io/managed-by={MANAGER},{PLACE_LABEL}={place}"


def job_object(
    cluster: Cluster,
    *,
    job: str,
    place: str,
    folder: Path,
    command: Sequence[str],
    owner: tuple[str, str] = ("", ""),
) -> dict[str, Any]:
    """Return the Job that runs a command.

    job: its id, which is the last part of `folder`. place: that of the gateway. folder: of the job, at the
    path at which the gateway has it; the pod has it there, too, and nothing else of the claim. owner: project
    and agent, which are told as annotations.
    """
    labels = {
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": MANAGER,
        PLACE_LABEL: place,
        JOB_LABEL: job,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name_of(job),
            "namespace": cluster.namespace,
            "labels": labels,
            "annotations": {"penstock/project": owner[0], "penstock/agent": owner[1]},
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",  # none beside one that still ends
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": _pod(cluster, job, folder, command)},
        },
    }


def _pod(cluster: Cluster, job: str, folder: Path, command: Sequence[str]) -> dict[str, Any]:
    place_in_claim = "/".join(filter(None, (cluster.claim_folder, job)))
    return {
        "restartPolicy": "Never",
        "serviceAccountName": cluster.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": cluster.grace_s,
        **({"nodeSelector": dict(cluster.node_selector)} if cluster.node_selector else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "training",
                "image": cluster.image,
                "command": list(command),
                "workingDir": str(folder),
                "env": _environment(cluster),
                "resources": {"requests": dict(cluster.requests), "limits": dict(cluster.limits)},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "jobs", "mountPath": str(folder), "subPath": place_in_claim},
                    {"name": "tmp", "mountPath": _TMP},
                ],
            }
        ],
        "volumes": [
            {"name": "jobs", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "tmp", "emptyDir": {"sizeLimit": _TMP_BYTES}},
        ],
    }


def _environment(cluster: Cluster) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [{"name": "HOME", "value": _TMP}]
    if cluster.registry_secret is not None:
        key = {"name": cluster.registry_secret, "key": "password"}
        told.append({"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": key}})
    return told
