"""The one call behind `penstock status`: ask a broker for the status of its run."""

import grpc

from penstock.config.settings import ConfigurationError
from penstock.protocol.limits import CALL_DEADLINE_S
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime.exit import Fatal
from penstock.v1 import control_pb2, control_pb2_grpc


def ask(
    address: str, credentials: Credentials, *, timeout_s: float = CALL_DEADLINE_S
) -> control_pb2.StatusReply:
    """Return the broker's reply.

    Raises Fatal when it does not answer, ConfigurationError for a bad address.
    """
    try:
        with open_channel(address, credentials) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.Status(control_pb2.StatusRequest(), timeout=timeout_s)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except grpc.RpcError as error:
        raise Fatal(
            f"broker at {address} does not answer: {error.details()}; is the run still going?"
        ) from error
