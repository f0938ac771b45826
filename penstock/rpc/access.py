"""Which party may call what: the one table of every server. What is not in it, nobody may call.

Only callers that proved who they are have a party; a server on plaintext (loopback, unix socket,
`--insecure`) asks nobody and serves all of it.
"""

from collections.abc import Mapping
from typing import Final

from penstock.rpc.identity import Party

ANYBODY: Final = frozenset(Party)
ACTOR: Final = frozenset({Party.ACTOR})
CLIENT: Final = frozenset({Party.CLIENT})
OPERATOR: Final = frozenset({Party.OPERATOR})

ACCESS: Final[Mapping[str, frozenset[Party]]] = {
    "/penstock.v1.ExperienceService/OpenSession": ACTOR,
    "/penstock.v1.ExperienceService/Append": ACTOR,
    "/penstock.v1.ExperienceService/CloseSession": ACTOR,
    "/penstock.v1.ExperienceService/ReportEpisodes": ACTOR,
    "/penstock.v1.WeightService/WatchLatest": ACTOR,
    "/penstock.v1.WeightService/GetWeights": ACTOR,
    "/penstock.v1.ControlService/Status": OPERATOR,
    "/penstock.v1.ControlService/Pause": OPERATOR,
    "/penstock.v1.ControlService/Resume": OPERATOR,
    "/penstock.v1.ControlService/Stop": OPERATOR,
    "/penstock.v1.ControlService/Checkpoint": OPERATOR,
    "/penstock.v1.ControlService/ListVersions": OPERATOR,
    "/penstock.v1.ControlService/Promote": OPERATOR,
    "/penstock.v1.ControlService/Rollback": OPERATOR,
    "/penstock.v1.ControlService/SetTraffic": OPERATOR,
    "/penstock.v1.PolicyService/Act": CLIENT,
    "/penstock.v1.PolicyService/ActStream": CLIENT,
    "/penstock.v1.PolicyService/StartEpisode": CLIENT,
    "/penstock.v1.PolicyService/Reward": CLIENT,
    "/penstock.v1.PolicyService/EndEpisode": CLIENT,
    "/penstock.v1.PolicyService/Describe": CLIENT,
    "/penstock.v1.RewardService/Score": ACTOR,
    "/penstock.v1.RewardService/DescribeModel": ACTOR,
    # Probes look at health with whatever certificate they have.
    "/grpc.health.v1.Health/Check": ANYBODY,
    "/grpc.health.v1.Health/Watch": ANYBODY,
    "/grpc.health.v1.Health/List": ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATOR,
}


def may_call(party: Party, method: str) -> bool:
    """Whether a caller of this party is served by this method."""
    return party in ACCESS.get(method, frozenset())
