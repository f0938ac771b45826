"""Write the OpenAPI documents that the types of the TypeScript client are made from.

python clients/describe.py FOLDER    writes gateway.json and prompts.json there

`npm run generate` in clients/typescript calls it.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.config.workload import find, installed, load
from penstock.gateway.application import gateway_listener, site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.requests import CallLimits
from penstock.gateway.frame.route_access import Parts, make_app
from penstock.gateway.process import Places, open_accounts, open_registry
from penstock.gateway.routes.console_routes import describe, document_of
from penstock.gateway.upstream import RunAddresses, Upstream
from penstock.rpc.auth import Credentials


def gateway_document() -> dict[str, Any]:
    """Return the document of a gateway with the services of all installed workloads."""
    services = [load(one.http)() for one in map(find, installed()) if one.http]
    with tempfile.TemporaryDirectory() as made:
        places = Places(state=Path(made))
        accounts, database = open_accounts(places)
        registry = open_registry(places)
        try:
            parts = Parts(accounts=accounts, registry=registry, limits=CallLimits())
            return describe(make_app(gateway_listener(parts, Doors(), services)))
        finally:
            registry.close()
            database.close()


def site_document(workload: str) -> dict[str, Any]:
    """Return the document of the API that a workload has of its own."""
    upstream = Upstream(addresses=RunAddresses, credentials=Credentials())
    return document_of(make_app(site_listener(load(find(workload).site)(), upstream, Doors())))


def main(folder: Path) -> None:
    """Write the documents. Without versions: these change without the API."""
    for name, one in {"gateway": gateway_document(), "prompts": site_document("prompts")}.items():
        one["info"]["version"] = "0"
        (folder / f"{name}.json").write_text(json.dumps(one, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
