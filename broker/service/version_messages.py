"""Versions and traffic as ControlService says them."""

from datetime import datetime

from penstock.registry.records import PolicyVersion, Traffic
from penstock.rpc.boundary import Malformed
from penstock.v1 import control_pb2 as pb


def version_to_proto(version: PolicyVersion) -> pb.RegisteredVersion:
    """The message of a registered version."""
    evaluation = version.evaluation
    return pb.RegisteredVersion(
        policy=version.policy,
        version=version.version,
        parent=version.parent or 0,
        run=version.run,
        update=version.update,
        sha256=version.sha256,
        size_bytes=version.size_bytes,
        configuration=version.configuration,
        evaluation=None
        if evaluation is None
        else pb.EvaluationResult(mean=evaluation.mean, std=evaluation.std, episodes=evaluation.episodes),
        origin=version.origin.value,
        status=version.status.value,
        standby=version.standby,
        pinned=version.pinned,
        reason=version.reason,
        created_ms=_milliseconds(version.created),
        changed_ms=_milliseconds(version.changed),
    )


def traffic_to_proto(traffic: Traffic) -> pb.Traffic:
    """The message of a policy's traffic."""
    return pb.Traffic(
        policy=traffic.policy,
        revision=traffic.revision,
        experiment=traffic.experiment,
        canary_share=traffic.canary_share,
        latest_share=traffic.latest_share,
        shadow=traffic.shadow or 0,
        pins=dict(traffic.pins),
    )


def traffic_from_proto(message: pb.Traffic, policy: str) -> Traffic:
    """The traffic that an operator wants; raises Malformed that names the field."""
    try:
        return Traffic(
            policy=message.policy or policy,
            revision=message.revision,
            experiment=message.experiment or "default",
            canary_share=message.canary_share,
            latest_share=message.latest_share,
            shadow=message.shadow or None,
            pins=dict(message.pins),
        )
    except ValueError as error:
        raise Malformed(f"traffic: {error}") from error


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
