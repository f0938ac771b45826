"""A policy server over TLS.

Clients are served, others of the run are told that they are not, and strangers hear nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.client import PolicyClient
from penstock.launch.commands.certificates import main as make_certificates
from penstock.launch.commands.request import Order
from penstock.rpc.auth import ACCESS, CLIENT, Credentials
from penstock.rpc.channel import open_channel
from penstock.v1 import policy_pb2 as pb
from penstock.v1.policy_pb2_grpc import PolicyServiceStub
from tests.support.run import harness
from tests.support.run.harness import SERVER_READY_S, BrokerProcess, reward_secured
from tests.support.run.serving_run import RUN, SERVICE, ServedRun
from tests.support.run.simulated_actor import code_of

CALLS: Final = {
    "Act": pb.ActRequest(),
    "StartEpisode": pb.StartEpisodeRequest(),
    "Reward": pb.RewardRequest(),
    "EndEpisode": pb.EndEpisodeRequest(),
    "Describe": pb.DescribeRequest(),
    "ActStream": pb.ActRequest(),
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(Order(folder=folder, run=RUN))
    return folder


@pytest.fixture(scope="module")
def server(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Whose clients are served the configuration in the run's folder says."""
    run = ServedRun(tmp_path_factory.mktemp("served") / "run")
    run.describe()
    run.promote(run.next_version())
    (run.folder / "config.toml").write_text(f'run = "{RUN}"\n')
    words = [f"--set={text}" for text in reward_secured(certificates, RUN) if not text.startswith("run=")]
    with harness.server(run.folder.parent, run.folder, "server", *words) as process:
        yield process


def shown(certificates: Path, name: str) -> Credentials:
    """What a caller of this name shows; nothing for ""."""
    return Credentials.from_files(
        insecure=False,
        certificate=certificates / f"{name}.pem" if name else None,
        key=certificates / f"{name}.key" if name else None,
        authority=certificates / "authority.pem",
    )


def code(channel: grpc.Channel, name: str) -> grpc.StatusCode:
    stub: Any = PolicyServiceStub(channel)
    try:
        if name == "ActStream":
            list(stub.ActStream(iter([CALLS[name]]), timeout=SERVER_READY_S))
        else:
            getattr(stub, name)(CALLS[name], timeout=SERVER_READY_S)
    except grpc.RpcError as error:
        return code_of(error)[0]
    return grpc.StatusCode.OK


def test_every_call_is_in_the_table_for_clients() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["PolicyService"].methods}
    assert methods == CALLS.keys()
    assert {path: parties for path, parties in ACCESS.items() if SERVICE in path} == {
        f"/{SERVICE}/{name}": CLIENT for name in methods
    }


def test_a_client_is_served(server: BrokerProcess, certificates: Path) -> None:
    with open_channel(server.address, shown(certificates, "client")) as channel:
        assert {name: code(channel, name) for name in CALLS} == dict.fromkeys(CALLS, grpc.StatusCode.OK)
    credentials = shown(certificates, "client")
    with PolicyClient(server.address, credentials=credentials, deadline_s=SERVER_READY_S) as client:
        episode = client.start_episode("ada")
        assert episode.act(np.zeros(4, np.float32)).version == 1
        assert episode.end(terminated=True, reward=1.0).total_return == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor", grpc.StatusCode.PERMISSION_DENIED),
        ("operator", grpc.StatusCode.PERMISSION_DENIED),
        ("", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_only_allowed_callers_are_served(
    server: BrokerProcess, certificates: Path, name: str, expected: grpc.StatusCode
) -> None:
    with open_channel(server.address, shown(certificates, name)) as channel:
        assert {call: code(channel, call) for call in CALLS} == dict.fromkeys(CALLS, expected)


def test_everyone_in_the_run_sees_health_and_operators_reflection(
    server: BrokerProcess, certificates: Path
) -> None:
    with open_channel(server.address, shown(certificates, "actor")) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=SERVER_READY_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with open_channel(server.address, shown(certificates, "operator")) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=SERVER_READY_S)
        assert SERVICE in {one.name for one in answer.list_services_response.service}
    with open_channel(server.address, shown(certificates, "client")) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([asked]), timeout=SERVER_READY_S))
        assert code_of(caught.value)[0] is grpc.StatusCode.PERMISSION_DENIED
