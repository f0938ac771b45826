"""Jobs as Jobs of a Kubernetes cluster, one pod each, on a folder that gateways and pods share.

    NOT_BEGUN ── create, under the name that the job's id gives ──► GOING_ON ──► outcome
                     AlreadyExists: it is there, and stays                  └─ delete (stop) ─► outcome

The state of a job follows from the cluster and the folder together; a gateway remembers nothing:

    Job in the cluster      begun.json    the job
    absent                  absent        has not begun, or was deleted before it began: nothing of it ran
    absent                  present       has ended: the folder tells how, or it is lost
    running, or ending      any           is running; if its pod cannot begin: `refused.json`, failed
    ended                   any           has ended: the folder tells how, else its pods do

A pod records once in the folder that it began, and a second pod that the cluster starts does nothing
(`job_process`). While the cluster does not answer, no job is begun and none is settled.

docs/gateway-team.md has an example of the file of `--cluster`.
"""

import json
import os
import re
import secrets
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.config.run_folder import read_whole
from penstock.gateway.jobs.job_records import CannotBegin, CannotLook, Job, Outcome, Stage
from penstock.gateway.store.tables import JobState
from penstock.launch.gateway.local_runner import CONFIG_FILE, RUN_FOLDER, JobFolders, dry_run
from penstock.launch.jobs.job_process import EXIT_BEGUN_BEFORE, IN_A_POD, LOG_FILE, note_durably
from penstock.launch.jobs.local_job import has_begun, noted_exit_code, read_noted
from penstock.launch.run.supervisor import last_line

REFUSED_FILE: Final = "refused.json"
OUTPUT_FILE: Final = "output"
FRESH_S: Final = 2.0
"""Seconds for which one look at the cluster is used for all jobs."""
ESTIMATE_S: Final = 1800.0
"""Longest time of a dry run, in seconds, with the wait for a node and the pull of the image."""
ANSWER_S: Final = 20
"""Longest wait for an answer of the cluster, in seconds."""
KEPT_S: Final = 7 * 24 * 3600
"""Seconds for which a Job that has ended stays in the cluster; its folder stays for good."""
JOB_LABEL: Final = "penstock/job"
PLACE_LABEL: Final = "penstock/place"
MANAGER: Final = "penstock-gateway"
USER: Final = 65532
"""User id of the images: gateway and trainings write the same folders."""
_TMP: Final = "/tmp"  # noqa: S108 - a volume of the pod's own
_TMP_BYTES: Final = "2Gi"
_GONE: Final = "its Job was taken away from the cluster: nothing says how it ended"
_INTERPRETER: Final = ("python", "-P", "-m")
"""Of the image, by its PATH."""
_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_BOUNDED: Final = frozenset({"cpu", "memory"})
_NO_ANSWER: Final = frozenset({0, 401, 408, 429})
"""Statuses below 500 that do not answer the request; 0: TLS failed."""
_IN_VAIN: Final = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image has no name that can be pulled",
    "ErrImageNeverPull": "its image is not on the node",
    "CreateContainerConfigError": "its container cannot be set up",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
}
"""Reasons of a waiting container that will not go away."""
_MOST_CHARS: Final = 500
"""Most characters that are kept of a message of the cluster."""

Name = Annotated[str, Field(pattern=_NAME)]
Object = Mapping[str, Any]


class Cluster(BaseModel):
    """Where on a cluster trainings run, as which user, and with what resources; fields as in the file.

    claim: shared PersistentVolumeClaim, ReadWriteMany. claim_folder: folder of the jobs in it, `jobs` where
    the claim is the --state. service_account: of the trainings; it needs no rights. registry_secret: Secret
    whose key `password` is the password of the registry. grace_s: seconds that a cancelled training has for
    its last checkpoint. start_s: seconds after which a pod that cannot begin is given up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: Name
    image: Annotated[str, Field(pattern=r"^\S{1,512}$")]
    claim: Name
    claim_folder: Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*)?$")] = ""
    service_account: Name = "trainer"
    registry_secret: Name | None = None
    grace_s: Annotated[int, Field(ge=1, le=3600)] = 300
    start_s: Annotated[int, Field(ge=1, le=86_400)] = 600
    requests: dict[str, str]
    limits: dict[str, str]
    node_selector: dict[str, str] = Field(default_factory=dict)

    @field_validator("requests", "limits")
    @classmethod
    def _are_amounts(cls, amounts: dict[str, str]) -> dict[str, str]:
        missing = ", ".join(sorted(_BOUNDED - amounts.keys()))
        if missing:
            raise ValueError(f"say {missing}, too: no training may take a whole node")
        for what, amount in amounts.items():
            if not _QUANTITY.fullmatch(amount):
                raise ValueError(f'{what}={amount!r}: use an amount such as "500m", "2" or "4Gi"')
        return amounts

    @field_validator("image")
    @classmethod
    def _is_one_image(cls, image: str) -> str:
        if "@sha256:" not in image and image.rpartition("/")[2].partition(":")[2] in {"", "latest"}:
            raise ValueError(
                "name a tag other than `latest`, or a digest: a training must not change its code"
            )
        return image


def read_cluster(file: Path) -> Cluster:
    """Return the cluster that a file describes; raises ConfigurationError that names the mistake."""
    try:
        return Cluster.model_validate(tomllib.loads(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"--cluster {file}: {field}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--cluster {file}: cannot be read as TOML: {error}") from error


class KubernetesRunner(JobFolders):
    """Runs jobs on a cluster. jobs: their folder, on the claim. templates: folder of the templates' files.

    Raises ConfigurationError for a wrong template and where no cluster is known, OSError for a folder that
    cannot be used.
    """

    def __init__(self, jobs: Path, templates: Path, cluster: Cluster) -> None:
        self._api = _Api(cluster.namespace)
        super().__init__(jobs, templates)
        self._cluster = cluster
        self._looking = threading.Lock()
        self._seen: tuple[float, tuple[list[Object], list[Object]]] | None = None

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        folder = self.folder(job.id)
        self.write_recipe(folder, job.template, job.numbers, settings)
        self._create(job.id, folder, LOG_FILE, ("--json",), (job.project, job.agent))

    def find(self, job: str) -> Stage | Outcome:
        refused = read_noted(self.jobs / job / REFUSED_FILE)
        if refused is not None:
            self._api.delete_job(name_of(job))
            return Outcome(state=JobState.FAILED, cause=refused["cause"])
        found, pods = self._of(job)
        if found is None:
            return self.outcome(job, lost=_GONE) if has_begun(self.jobs / job) else Stage.NOT_BEGUN
        if _is_over(found) and not any(map(_lives, pods)):
            return self._ended(job, found, pods)
        cause = _waits_in_vain(pods)
        if cause and _age_s(found) > self._cluster.start_s and "deletionTimestamp" not in found["metadata"]:
            note_durably(self.jobs / job / REFUSED_FILE, {"cause": cause})
            self._forget()
            return self.find(job)
        return Stage.GOING_ON

    def stop(self, job: str) -> bool:
        self._forget()
        return self._api.delete_job(name_of(job))

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        name = f"estimate-{secrets.token_hex(6)}"
        folder = self.folder(name)
        try:
            self.write_recipe(folder, template, numbers, prepare(folder))
            self._create(name, folder, OUTPUT_FILE, ("--dry-run", "--json"))
            ended = self._awaited(name)
            code = noted_exit_code(folder)
            if code is None:
                raise CannotBegin(f"the dry run ended: {ended.cause}")
            return dry_run(read_whole(folder / OUTPUT_FILE), last_line(folder / LOG_FILE), code)
        finally:
            self.stop(name)
            shutil.rmtree(folder, ignore_errors=True)

    def _create(
        self, job: str, folder: Path, output: str, words: tuple[str, ...], owner: tuple[str, str] = ("", "")
    ) -> None:
        train = ("penstock.launch.cli", "train", CONFIG_FILE, "--run-dir", RUN_FOLDER, *words)
        around = (*_INTERPRETER, "penstock.launch.jobs.job_process", IN_A_POD, str(folder), output)
        command = (*around, *_INTERPRETER, *train)
        one = job_object(
            self._cluster, job=job, place=self.place, folder=folder, command=command, owner=owner
        )
        self._api.create(one)
        self._forget()

    def _awaited(self, name: str) -> Outcome:
        """Wait until a job has ended, and return how; raises CannotBegin after ESTIMATE_S."""
        until_s = time.monotonic() + ESTIMATE_S
        while time.monotonic() < until_s:
            found = self.find(name)
            if isinstance(found, Outcome):
                return found
            time.sleep(FRESH_S)
        raise CannotBegin(f"the dry run took longer than {ESTIMATE_S:g} s: train without it")

    def _ended(self, job: str, found: Object, pods: list[Object]) -> Outcome:
        """Return how a job ended whose Job has ended: by its files, else by the state of the cluster."""
        if noted_exit_code(self.jobs / job) is not None or _ended_by(found) == "Complete":
            return self.outcome(job)
        killed = _why_killed(pods)
        outcome = self.outcome(job, lost=killed or _why_failed(found, pods))
        is_lost = bool(killed) or outcome.state is not JobState.LOST
        return outcome if is_lost else replace(outcome, state=JobState.FAILED)

    def _of(self, job: str) -> tuple[Object | None, list[Object]]:
        """Return the Job of a job, None where there is none, and its pods; raises CannotLook."""
        jobs, pods = (
            [one for one in some if one["metadata"].get("labels", {}).get(JOB_LABEL) == job]
            for some in self._look()
        )
        return (jobs[0] if jobs else None), pods

    def _look(self) -> tuple[list[Object], list[Object]]:
        with self._looking:
            now = time.monotonic()
            if self._seen is None or self._seen[0] + FRESH_S <= now:
                self._seen = now, self._api.jobs_and_pods(selector(self.place))
            return self._seen[1]

    def _forget(self) -> None:
        with self._looking:
            self._seen = None


def _lives(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}


def _age_s(job: Object) -> float:
    made = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return (datetime.now(UTC) - made).total_seconds()


class _Api:
    """The Jobs and pods of a namespace of the cluster of KUBECONFIG, else of that of this process's pod.

    Raises ConfigurationError without either of them, or without the package for Kubernetes.
    """

    def __init__(self, namespace: str) -> None:
        try:
            from kubernetes import client
            from urllib3.exceptions import HTTPError
        except ImportError as error:
            raise ConfigurationError(
                f"--runner kubernetes: {error}; {how_to_install('kubernetes')}"
            ) from error
        reached = client.ApiClient(_credentials())
        self._batch, self._core = client.BatchV1Api(reached), client.CoreV1Api(reached)
        self._refused, self._away = client.ApiException, HTTPError
        self._namespace = namespace

    def create(self, one: Object) -> bool:
        """Make a Job; False where one of its name exists, which stays as it is.

        Raises CannotBegin where the cluster refuses it, CannotLook where it does not answer.
        """
        try:
            self._ask(self._batch.create_namespaced_job, body=one, field_validation="Strict")
        except self._refused as error:
            if error.status == 409:
                return False
            raise CannotBegin(f"the cluster refuses it: {_message(error)}") from error
        return True

    def jobs_and_pods(self, selector: str) -> tuple[list[Object], list[Object]]:
        """Return the Jobs and the pods of a label selector.

        Raises CannotLook where the cluster does not answer, or refuses.
        """
        try:
            jobs = self._ask(self._batch.list_namespaced_job, label_selector=selector)
            pods = self._ask(self._core.list_namespaced_pod, label_selector=selector)
        except self._refused as error:
            raise CannotLook(f"the cluster does not show its Jobs: {_message(error)}") from error
        return jobs["items"], pods["items"]

    def delete_job(self, name: str) -> bool:
        """Delete a Job, its pods first; False where there is none. Raises CannotLook."""
        try:
            self._ask(self._batch.delete_namespaced_job, name=name, propagation_policy="Foreground")
        except self._refused as error:
            if error.status == 404:
                return False
            raise CannotLook(f"the cluster does not delete a Job: {_message(error)}") from error
        return True

    def _ask(self, call: Callable[..., Any], **words: Any) -> dict[str, Any]:
        """Return an answer as JSON values: a newer cluster may send fields that the package does not know.

        Raises ApiException where the cluster refuses, CannotLook where it does not answer.
        """
        own: dict[str, Any] = {"namespace": self._namespace, "_request_timeout": ANSWER_S}
        try:
            found: dict[str, Any] = json.loads(call(**own, **words, _preload_content=False).data)
        except self._refused as error:
            if error.status in _NO_ANSWER or error.status >= 500:
                raise CannotLook(f"the cluster does not answer: {_message(error)}") from error
            raise
        except (self._away, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CannotLook(f"the cluster does not answer: {str(error)[:_MOST_CHARS]}") from error
        return found


def _credentials() -> Any:
    from kubernetes import client, config

    made, file = client.Configuration(), os.environ.get("KUBECONFIG") or "~/.kube/config"
    made.retries = 0  # who asks asks again
    try:
        config.load_kube_config(file, client_configuration=made)
    except config.ConfigException as absent:
        try:
            config.load_incluster_config(made)
        except config.ConfigException as error:
            raise ConfigurationError(
                f"--runner kubernetes: no cluster: {absent} {error} Set KUBECONFIG, or run in a pod of one"
            ) from error
    return made


def _message(error: Any) -> str:
    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = error.body or error.reason
    return " ".join(str(text).split())[:_MOST_CHARS]


def name_of(job: str) -> str:
    """Return the name of a job's Job: always the same for a job, so that it exists once."""
    return f"penstock-{job}"


def selector(place: str) -> str:
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

    job: its id, which is the last part of `folder`. place: the gateway's name in the rows of jobs. folder: of
    the job, at one path for gateway and pod; the pod sees no other part of the claim. owner: project and
    agent, for annotations.
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
    variables: list[dict[str, Any]] = [{"name": "HOME", "value": _TMP}]
    if cluster.registry_secret is not None:
        key = {"name": cluster.registry_secret, "key": "password"}
        variables.append({"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": key}})
    return variables


def _is_over(job: Object) -> bool:
    """Return whether a Job has ended, and no pod of it is on its way out."""
    return bool(_ended_by(job)) and "deletionTimestamp" not in job["metadata"]


def _ended_by(job: Object) -> str:
    """Return the condition by which a Job has ended, `Complete` or `Failed`; "" before."""
    conditions = job.get("status", {}).get("conditions") or ()
    ended = [one["type"] for one in conditions if one["status"] == "True"]
    return next((one for one in ended if one in {"Complete", "Failed"}), "")


def _waits_in_vain(pods: Sequence[Object]) -> str:
    """Return why a pod can never begin; "" where it may still begin."""
    for status in _containers(pods):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _IN_VAIN:
            return _with(_IN_VAIN[waiting["reason"]], waiting.get("message", ""))
    return ""


def _why_killed(pods: Sequence[Object]) -> str:
    """Return how the cluster ended a training, or lost track of it; "" where the program ended itself."""
    for status in _containers(pods):
        if (status.get("state", {}).get("terminated") or {}).get("exitCode") == EXIT_BEGUN_BEFORE:
            return "the cluster started it a second time, which did nothing: the end of the first is unknown"
    for pod in pods:
        status = pod.get("status", {})
        if status.get("reason") == "Evicted":
            return _with("its node had no room for it and evicted it", status.get("message", ""))
        for one in status.get("conditions") or ():
            if one["type"] == "DisruptionTarget" and one["status"] == "True":
                return _with("its pod was taken off its node", one.get("message", ""))
    return ""


def _why_failed(job: Object, pods: Sequence[Object]) -> str:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    limit = container["resources"]["limits"]["memory"]
    for status in _containers(pods):
        ended = status.get("state", {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            return f"it needed more memory than its limit of {limit}: use a smaller preset, or ask for more"
        if ended.get("exitCode"):
            return _with(f"it ended with exit code {ended['exitCode']}", ended.get("message", ""))
    for one in job.get("status", {}).get("conditions") or ():
        if one["type"] == "Failed":
            return _with("its Job failed", one.get("message", ""))
    return "its Job failed, and nothing says why"


def _containers(pods: Sequence[Object]) -> Iterator[Object]:
    for pod in pods:
        yield from pod.get("status", {}).get("containerStatuses") or ()


def _with(what: str, message: str) -> str:
    short = " ".join(message.split())[:_MOST_CHARS]
    return f"{what}: {short}" if short else what
