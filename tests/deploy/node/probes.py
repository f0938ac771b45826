"""Questions over HTTP, from the node to a pod: probes, as the kubelet makes them, and metrics."""

import http.client

from tests.deploy.manifests import Object


def ask_http(address: str, container: Object, get: Object, timeout: float) -> str:
    """What is wrong with the answer to a GET, "" when nothing.

    `get` names a port of the container, and a path.
    """
    try:
        status, text = fetch(address, port_of(container, get["port"]), get["path"], timeout)
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return "" if 200 <= status < 400 else f"{status} {text}"


def fetch(address: str, port: int, path: str, timeout: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace").strip()
    finally:
        connection.close()


def port_of(container: Object, name: str) -> int:
    (number,) = [port["containerPort"] for port in container["ports"] if port["name"] == name]
    return int(number)
