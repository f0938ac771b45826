"""Write the OpenAPI documents that the TypeScript client's types are made from.

python clients/describe.py           write clients/typescript/openapi/*.json
python clients/describe.py --check   write nothing; exit 1 naming the documents that have changed

Behind it: `npm run generate` in clients/typescript.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from penstock.config.plugins import installed
from penstock.config.workload import find, load
from penstock.gateway.application import make_app
from penstock.gateway.frame.api_description import describe
from penstock.gateway.frame.call_limits import CallLimits
from penstock.gateway.frame.doors import Doors
from penstock.gateway.frame.parts import Parts
from penstock.gateway.process import Places, open_accounts, open_registry
from penstock.gateway.sites.site import RunAddresses, Upstream
from penstock.rpc.auth import Credentials

FOLDER: Final = Path(__file__).resolve().parent / "typescript" / "openapi"


def gateway_document() -> dict[str, Any]:
    """Return the document of a gateway with the services of all installed workloads."""
    services = [load(one.http)() for one in map(find, installed()) if one.http]
    with tempfile.TemporaryDirectory() as made:
        places = Places(state=Path(made))
        accounts, database = open_accounts(places)
        registry = open_registry(places)
        try:
            parts = Parts(accounts=accounts, registry=registry, limits=CallLimits())
            return describe(make_app(parts, Doors(), services))
        finally:
            registry.close()
            database.close()


def site_document(workload: str) -> dict[str, Any]:
    """Return the document of the API that a workload has of its own."""
    upstream = Upstream(addresses=RunAddresses, credentials=Credentials())
    found: dict[str, Any] = load(find(workload).site)().make_app(upstream).openapi()
    return found


def documents() -> dict[str, str]:
    """Return the documents by name, as they are written. Without versions: these change without the API."""
    made = {"gateway": gateway_document(), "prompts": site_document("prompts")}
    for one in made.values():
        one["info"]["version"] = "0"
    return {f"{name}.json": json.dumps(one, indent=1, sort_keys=True) + "\n" for name, one in made.items()}


def main() -> int:
    """Exit status: 0, or 1 when `--check` found a difference."""
    changed = []
    for name, text in documents().items():
        file = FOLDER / name
        if not file.exists() or file.read_text() != text:
            changed.append(name)
        if sys.argv[1:] != ["--check"]:
            file.write_text(text)
    if sys.argv[1:] == ["--check"] and changed:
        sys.stderr.write(f"{', '.join(changed)}: run python clients/describe.py, then npm run generate\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
