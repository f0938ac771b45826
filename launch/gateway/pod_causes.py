"""Why a job of a cluster has failed, or cannot begin, in words: from its Job and its pods."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from launch.gateway.pod_process import EXIT_BEGUN_BEFORE

Object = Mapping[str, Any]

_IN_VAIN: Final = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image has no name that can be pulled",
    "ErrImageNeverPull": "its image is not on the node",
    "CreateContainerConfigError": "its container cannot be set up",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
}
"""Reasons for which a container waits that more time does not cure."""
_MOST_CHARS: Final = 300


def is_over(job: Object) -> bool:
    """Return whether a Job has ended, and no pod of it is on its way out."""
    return bool(ended_by(job)) and "deletionTimestamp" not in job["metadata"]


def ended_by(job: Object) -> str:
    """Return the condition by which a Job has ended, `Complete` or `Failed`; "" before."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next(
        (
            one["type"]
            for one in conditions
            if one["type"] in {"Complete", "Failed"} and one["status"] == "True"
        ),
        "",
    )


def waits_in_vain(pods: Sequence[Object]) -> str:
    """Return why a pod cannot begin, where waiting does not help; "" where there is no such reason."""
    for status in _containers(pods):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _IN_VAIN:
            return _told(_IN_VAIN[waiting["reason"]], waiting.get("message", ""))
    return ""


def why_killed(pods: Sequence[Object]) -> str:
    """Return how the cluster ended a training, or lost sight of it; "" where its program ended it."""
    for status in _containers(pods):
        if (status.get("state", {}).get("terminated") or {}).get("exitCode") == EXIT_BEGUN_BEFORE:
            return "the cluster started it a second time, which did nothing: the end of the first is unknown"
    for pod in pods:
        status = pod.get("status", {})
        if status.get("reason") == "Evicted":
            return _told("its node had no room for it and evicted it", status.get("message", ""))
        for one in status.get("conditions") or ():
            if one["type"] == "DisruptionTarget" and one["status"] == "True":
                return _told("its pod was taken off its node", one.get("message", ""))
    return ""


def why_failed(job: Object, pods: Sequence[Object]) -> str:
    """Return why a Job failed whose program left no word."""
    limit = _memory_limit(job)
    for status in _containers(pods):
        ended = status.get("state", {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            return f"it needed more memory than its limit of {limit}: use a smaller preset, or ask for more"
        if ended.get("exitCode"):
            return _told(f"it ended with exit code {ended['exitCode']}", ended.get("message", ""))
    for one in job.get("status", {}).get("conditions") or ():
        if one["type"] == "Failed":
            return _told("its Job failed", one.get("message", ""))
    return "its Job failed, and nothing says why"


def _containers(pods: Sequence[Object]) -> Iterator[Object]:
    for pod in pods:
        yield from pod.get("status", {}).get("containerStatuses") or ()


def _memory_limit(job: Object) -> str:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return str(container["resources"]["limits"]["memory"])


def _told(what: str, message: str) -> str:
    said = " ".join(message.split())[:_MOST_CHARS]
    return f"{what}: {said}" if said else what
