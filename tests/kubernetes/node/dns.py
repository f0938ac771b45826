"""Names of services, of headless services' ready pods and of these pods' hostnames: A records alone.

It runs in a pod of the tests' own cluster, which can pull no image of a name server.
"""

import json
import socket
import ssl
import struct
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API: Final = "https://10.96.0.1"
DOMAIN: Final = "svc.cluster.local"
PORT: Final = 5353
EVERY_S: Final = 1.0
ADDRESS_RECORD: Final = 1
NO_SUCH_NAME: Final = 3

Names = dict[str, list[str]]


def items(path: str, context: ssl.SSLContext) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    request = urllib.request.Request(API + path, headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, context=context, timeout=5) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)["items"]
    return found


def read_names(context: ssl.SSLContext) -> Names:
    names: Names = {}
    headless: dict[tuple[str, str], bool] = {}
    for service in items("/api/v1/services", context):
        metadata, spec = service["metadata"], service["spec"]
        alone = spec.get("clusterIP") in {None, "None"}
        names[f"{metadata['name']}.{metadata['namespace']}.{DOMAIN}"] = [] if alone else [spec["clusterIP"]]
        if alone:
            key = (metadata["namespace"], metadata["name"])
            headless[key] = bool(spec.get("publishNotReadyAddresses"))
    for one in items("/apis/discovery.k8s.io/v1/endpointslices", context):
        labels = one["metadata"].get("labels", {})
        key = (one["metadata"]["namespace"], labels.get("kubernetes.io/service-name", ""))
        if key not in headless:
            continue
        name = f"{key[1]}.{key[0]}.{DOMAIN}"
        for endpoint in one.get("endpoints") or ():
            if not (endpoint["conditions"].get("ready") or headless[key]):
                continue
            names.setdefault(name, []).extend(endpoint["addresses"])
            if endpoint.get("hostname"):
                names.setdefault(f"{endpoint['hostname']}.{name}", []).extend(endpoint["addresses"])
    return names


def reply(question: bytes, names: Names) -> bytes:
    at, labels = 12, []
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += question[at] + 1
    (kind,) = struct.unpack(">H", question[at + 1 : at + 3])
    name = ".".join(labels).lower()
    addresses = names.get(name, []) if kind == ADDRESS_RECORD else []
    code = 0 if name in names else NO_SUCH_NAME
    head = question[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(addresses), 0, 0)
    records = (
        b"\xc0\x0c" + struct.pack(">HHIH", ADDRESS_RECORD, 1, 1, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return head + question[12 : at + 5] + b"".join(records)


class Table:
    def __init__(self) -> None:
        self.names: Names = {}
        self._context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        self._never = threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while not self._never.wait(EVERY_S):
            try:
                self.names = read_names(self._context)
            except (urllib.error.URLError, TimeoutError) as error:
                print(f"the API server does not answer: {error}", flush=True)


def main() -> None:
    table = Table()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.bind(("0.0.0.0", PORT))  # noqa: S104
        while True:
            question, asker = door.recvfrom(4096)
            try:
                door.sendto(reply(question, table.names), asker)
            except (IndexError, UnicodeDecodeError, struct.error) as error:
                print(f"not a question: {error}", flush=True)


if __name__ == "__main__":
    main()
