"""Jobs as Jobs of a Kubernetes cluster, one pod each, on a folder that gateways and pods share.

    NOT_BEGUN ── create, under the name that the job's id gives ──► GOING_ON ──► outcome
                     AlreadyExists: it is there, and stays                  └─ delete (stop) ─► outcome

What the cluster says and what lies in the folder tell together where a job is; a gateway remembers nothing:

    Job in the cluster      begun.json    the job
    none                    none          was never begun, or taken away before it began: nothing of it ran
    none                    there         has ended: the folder says how, or it is lost
    goes on, or is ending   any           goes on; if its pod cannot begin: `refused.json`, and it has failed
    ended                   any           has ended: the folder says how, else its pods do

A pod notes once in the folder that it began, and a second one that the cluster starts does nothing. While the
cluster does not answer nothing is begun and nothing is settled.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gateway.jobs.job_records import Job, Outcome
from gateway.jobs.runner import CannotBegin, Stage
from gateway.store.tables import JobState
from launch.gateway import pod_causes
from launch.gateway.cluster_file import Cluster
from launch.gateway.job_folders import CONFIG_FILE, RUN_FOLDER, JobFolders, dry_run, read_noted
from launch.gateway.job_objects import JOB_LABEL, job_object, name_of, selector
from launch.gateway.job_process import ENDED_FILE, LOG_FILE, write_durably
from launch.gateway.kubectl import Kubectl
from launch.run.child_process import last_line
from penstock.config.run_files import read_whole

REFUSED_FILE: Final = "refused.json"
OUTPUT_FILE: Final = "output"
FRESH_S: Final = 2.0
"""How long one look at the cluster stands for all jobs, in seconds."""
ESTIMATE_S: Final = 1800.0
"""Longest time of a dry run, in seconds; its pod may wait for room, and its image be pulled."""
_GONE: Final = "its Job was taken away from the cluster: nothing says how it ended"
_INTERPRETER: Final = ("python", "-P", "-m")
"""Of the image, by its PATH."""


class KubernetesRunner(JobFolders):
    """Runs jobs on a cluster. jobs: their folder, on the claim. templates: folder of the templates' files.

    Raises ConfigurationError for a template that is wrong and without `kubectl`, OSError for a folder that
    cannot be used.
    """

    def __init__(self, jobs: Path, templates: Path, cluster: Cluster) -> None:
        self._kubectl = Kubectl(cluster.namespace)
        super().__init__(jobs, templates)
        self._cluster = cluster
        self._looking = threading.Lock()
        self._seen: tuple[float, list[dict[str, Any]]] | None = None

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        """Have the cluster run a job, unless it has it; raises CannotBegin, CannotLook, OSError."""
        folder = self.folder(job.id)
        self.write_recipe(folder, job.template, job.numbers, settings)
        self._create(job.id, folder, LOG_FILE, ("--json",), (job.project, job.agent))

    def find(self, job: str) -> Stage | Outcome:
        """Return where a job is, also of one that another gateway began; raises CannotLook."""
        refused = read_noted(self.jobs / job / REFUSED_FILE)
        if refused is not None:
            self._kubectl.delete_job(name_of(job))
            return Outcome(state=JobState.FAILED, cause=refused["cause"])
        found, pods = self._of(job)
        if found is None:
            return self.outcome(job, lost=_GONE) if self.has_begun(job) else Stage.NOT_BEGUN
        if pod_causes.is_over(found) and not any(map(_lives, pods)):
            return self._ended(job, found, pods)
        cause = pod_causes.waits_in_vain(pods)
        if cause and _age_s(found) > self._cluster.start_s and "deletionTimestamp" not in found["metadata"]:
            write_durably(self.jobs / job / REFUSED_FILE, {"cause": cause})
            self._forget()
            return self.find(job)
        return Stage.GOING_ON

    def stop(self, job: str) -> bool:
        """Ask a job to end; False: the cluster does not have it. Raises CannotLook."""
        self._forget()
        return self._kubectl.delete_job(name_of(job))

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values, made by a pod as the job would be.

        Raises CannotBegin, CannotLook, OSError.
        """
        name = f"estimate-{secrets.token_hex(6)}"
        folder = self.folder(name)
        try:
            self.write_recipe(folder, template, numbers, prepare(folder))
            self._create(name, folder, OUTPUT_FILE, ("--dry-run", "--json"))
            ended = self._awaited(name)
            code = (read_noted(folder / ENDED_FILE) or {}).get("code")
            if code is None:
                raise CannotBegin(f"the dry run ended: {ended.cause}")
            return dry_run(read_whole(folder / OUTPUT_FILE), last_line(folder / LOG_FILE), code)
        finally:
            self.stop(name)
            shutil.rmtree(folder, ignore_errors=True)

    def _create(
        self, job: str, folder: Path, output: str, words: tuple[str, ...], owner: tuple[str, str] = ("", "")
    ) -> None:
        train = ("launch.cli", "train", CONFIG_FILE, "--run-dir", RUN_FOLDER, *words)
        command = (*_INTERPRETER, "launch.gateway.pod_process", str(folder), output, *_INTERPRETER, *train)
        one = job_object(
            self._cluster, job=job, place=self.place, folder=folder, command=command, owner=owner
        )
        self._kubectl.create(one)
        self._forget()

    def _awaited(self, name: str) -> Outcome:
        """Return how a job of this runner has ended, when it has; raises CannotBegin after ESTIMATE_S."""
        until_s = time.monotonic() + ESTIMATE_S
        while time.monotonic() < until_s:
            found = self.find(name)
            if isinstance(found, Outcome):
                return found
            time.sleep(FRESH_S)
        raise CannotBegin(f"the dry run took longer than {ESTIMATE_S:g} s: train without it")

    def _ended(self, job: str, found: dict[str, Any], pods: list[dict[str, Any]]) -> Outcome:
        """Return how a job has ended whose Job has: by what it left, else by what the cluster says."""
        if read_noted(self.jobs / job / ENDED_FILE) is not None or pod_causes.ended_by(found) == "Complete":
            return self.outcome(job)
        killed = pod_causes.why_killed(pods)
        outcome = self.outcome(job, lost=killed or pod_causes.why_failed(found, pods))
        is_lost = bool(killed) or outcome.state is not JobState.LOST
        return outcome if is_lost else replace(outcome, state=JobState.FAILED)

    def _of(self, job: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Return the Job of a job, None where there is none, and its pods; raises CannotLook."""
        own = [one for one in self._look() if one["metadata"].get("labels", {}).get(JOB_LABEL) == job]
        jobs = [one for one in own if one["kind"] == "Job"]
        return (jobs[0] if jobs else None), [one for one in own if one["kind"] == "Pod"]

    def _look(self) -> list[dict[str, Any]]:
        with self._looking:
            now = time.monotonic()
            if self._seen is None or self._seen[0] + FRESH_S <= now:
                self._seen = now, self._kubectl.jobs_and_pods(selector(self.place))
            return self._seen[1]

    def _forget(self) -> None:
        with self._looking:
            self._seen = None


def _lives(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}


def _age_s(job: Mapping[str, Any]) -> float:
    made = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return (datetime.now(UTC) - made).total_seconds()
