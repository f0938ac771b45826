"""The policy that a run ends with, as files that need no broker: `policies/final.safetensors` and `policy.json`.

`policy.json` holds the encoded run specification (spaces, environment, policy and evaluation sections),
which version the weights are and their digest. Both files are replaced whole; the digest tells a pair
that does not belong together.
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.policy import weights
from penstock.wire.specification import RunSpecification

FOLDER: Final = "policies"
_BLOB: Final = "final.safetensors"
_DESCRIPTION: Final = "policy.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPolicy:
    """blob: safetensors. version: of its publication. update: updates behind it."""

    specification: RunSpecification
    blob: bytes
    version: int
    update: int


def write_final(run_dir: Path, final: FinalPolicy) -> None:
    """Replace the run's final policy."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    specification = final.specification
    description = {
        "run": specification.run,
        "seed": specification.seed,
        "workload": specification.workload,
        "environment": json.loads(specification.environment_json),
        "policy": json.loads(specification.policy_json),
        "observation_space": repr(specification.observation_space),
        "action_space": repr(specification.action_space),
        "version": final.version,
        "update": final.update,
        "sha256": weights.sha256(final.blob),
        "specification": base64.b64encode(specification.encode()).decode(),
    }
    _replace(folder / _BLOB, final.blob)
    _replace(folder / _DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())


def read_final(run_dir: Path) -> FinalPolicy:
    """The final policy of a run; raises ValueError that says what is missing or damaged."""
    folder = run_dir / FOLDER
    try:
        description = json.loads((folder / _DESCRIPTION).read_bytes())
        blob = (folder / _BLOB).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: not there; has the run ended?") from error
    if weights.sha256(blob) != description["sha256"]:
        raise ValueError(
            f"{folder / _BLOB}: its SHA-256 is not the one in {_DESCRIPTION}; resume the run to repair"
        )
    return FinalPolicy(
        specification=RunSpecification.decode(base64.b64decode(description["specification"])),
        blob=blob,
        version=int(description["version"]),
        update=int(description["update"]),
    )


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
