"""Which party may call what: the table of the core's servers. A call that is not in it is served to no party.

The server of a workload has calls of its own, which it hands to its gate as a table of the same kind.

Only callers that proved who they are have a party; a server on plaintext (loopback, unix socket,
`--insecure`) asks for no identity and serves all of it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from penstock.rpc.identity import Party

ANYBODY: Final = frozenset(Party)
ACTOR: Final = frozenset({Party.ACTOR})
CLIENT: Final = frozenset({Party.CLIENT})
OPERATOR: Final = frozenset({Party.OPERATOR})

Calls = Mapping[str, frozenset[Party]]
"""Parties by the full name of a method, such as "/package.Service/Method"."""
NO_CALLS: Final[Calls] = MappingProxyType({})
ACCESS: Final[Calls] = {
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
    "/penstock.v1.ControlService/Flush": OPERATOR,
    "/penstock.v1.ControlService/Restore": OPERATOR,
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
    # Probes look at health with whatever certificate they have.
    "/grpc.health.v1.Health/Check": ANYBODY,
    "/grpc.health.v1.Health/Watch": ANYBODY,
    "/grpc.health.v1.Health/List": ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATOR,
}


def may_call(party: Party, method: str, own: Calls = NO_CALLS) -> bool:
    """Return whether a caller of this party is served by this method.

    own: calls of the server that the core does not have; where both tables have one, the core's counts.
    """
    return party in ACCESS.get(method, own.get(method, frozenset()))
