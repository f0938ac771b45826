"""Probes over HTTP, from the node to a pod, as the kubelet makes them."""

import http.client

from tests.deploy.manifests import Object


def ask_http(address: str, container: Object, get: Object, timeout: float) -> str:
    """What is wrong with the answer to a GET, "" when nothing; `get` names a port of the container, and a path."""
    connection = http.client.HTTPConnection(address, port_of(container, get["port"]), timeout=timeout)
    try:
        connection.request("GET", get["path"])
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if 200 <= reply.status < 400 else f"{reply.status} {text}"


def port_of(container: Object, name: str) -> int:
    """The number of a named port."""
    (number,) = [port["containerPort"] for port in container["ports"] if port["name"] == name]
    return int(number)
