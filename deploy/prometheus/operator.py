"""The rules and alerts as an object for the Prometheus operator: written, or with --check compared.

kustomize puts no file into a field of another object, so that the manifest is made from the files that
Prometheus itself reads elsewhere.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import yaml

HERE: Final = Path(__file__).parent
SOURCES: Final = (HERE / "rules.yml", HERE / "alerts.yml")
MANIFEST: Final = HERE.parent / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
HEAD: Final = "# Written by `make dashboards` from deploy/prometheus: change it there.\n"


def manifest() -> str:
    """Return the text of the manifest."""
    groups: list[Any] = []
    for source in SOURCES:
        groups += yaml.safe_load(source.read_text())["groups"]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "penstock"},
        "spec": {"groups": groups},
    }
    return HEAD + str(yaml.safe_dump(rule, sort_keys=False, width=110))


def main() -> int:
    """Return 0 when the manifest was written, or is up to date."""
    parser = argparse.ArgumentParser(prog="python -m deploy.prometheus.operator", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the manifest differs"
    )
    if not parser.parse_args().check:
        MANIFEST.write_text(manifest())
    elif not MANIFEST.exists() or MANIFEST.read_text() != manifest():
        print(f"differs: {MANIFEST}; make dashboards")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
