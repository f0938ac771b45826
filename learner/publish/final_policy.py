"""The policy that a run ends with, as files that need no broker: `final.safetensors` and `policy.json`.

`policy.json` holds the encoded run specification from the start of the run on, and at its end the version of
the weights and their digest, which reveals a pair that does not belong together.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.policy import weights
from penstock.protocol.specification import RunSpecification
from penstock.registry.weight_files import DESCRIPTION, FOLDER, name_latest, replace_file

_BLOB: Final = "final.safetensors"
_ENDED: Final = ("version", "update", "sha256")
"""Fields of the description that are known when a run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPolicy:
    """The weights that a run ends with.

    blob: safetensors. version: of its publication. update: updates behind it.
    """

    specification: RunSpecification
    blob: bytes
    version: int
    update: int


def write_specification(run_dir: Path, specification: RunSpecification) -> None:
    """Describe a run that begins or goes on; the record of an earlier end is preserved."""
    path = run_dir / FOLDER / DESCRIPTION
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):
        before = {}
    known = {name: before[name] for name in _ENDED} if before.keys() >= set(_ENDED) else {}
    _write_description(path, specification, known)


def write_final(run_dir: Path, final: FinalPolicy) -> None:
    """Replace the run's final policy; raises OSError."""
    folder = run_dir / FOLDER
    replace_file(folder / _BLOB, final.blob)
    name_final(run_dir)
    known = {"version": final.version, "update": final.update, "sha256": weights.sha256(final.blob)}
    _write_description(folder / DESCRIPTION, final.specification, known)


def name_final(run_dir: Path) -> None:
    """Let `latest` be a link to the final policy; a version that is kept after it would be the latest."""
    name_latest(run_dir, _BLOB)


def _write_description(path: Path, specification: RunSpecification, known: Mapping[str, Any]) -> None:
    description = {
        "run": specification.run,
        "seed": specification.seed,
        "workload": specification.workload,
        "environment": json.loads(specification.environment_json),
        "policy": json.loads(specification.policy_json),
        "observation_space": repr(specification.observation_space),
        "action_space": repr(specification.action_space),
        **known,
        "specification": base64.b64encode(specification.encode()).decode(),
    }
    replace_file(path, (json.dumps(description, indent=2) + "\n").encode())


def read_final(run_dir: Path) -> FinalPolicy:
    """Return the final policy of a run; raises ValueError that says what is missing or damaged."""
    folder = run_dir / FOLDER
    try:
        description = json.loads((folder / DESCRIPTION).read_bytes())
        blob = (folder / _BLOB).read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: not there; has the run ended?") from error
    if not description.keys() >= set(_ENDED):
        raise ValueError(f"{folder / DESCRIPTION}: names no final version; has the run ended?")
    if weights.sha256(blob) != description["sha256"]:
        raise ValueError(
            f"{folder / _BLOB}: its SHA-256 is not the one in {DESCRIPTION}; resume the run to repair"
        )
    return FinalPolicy(
        specification=RunSpecification.decode(base64.b64decode(description["specification"])),
        blob=blob,
        version=int(description["version"]),
        update=int(description["update"]),
    )
