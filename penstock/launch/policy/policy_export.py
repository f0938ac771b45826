"""`penstock policy export`: write a version to a file for other programs.

The run's folder alone is read.
"""

import sys
from pathlib import Path

from penstock.config.extras import how_to_install
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError
from penstock.launch.policy.registry_place import RegistryPolicy, opened
from penstock.registry.records import PolicyVersion
from penstock.registry.weight_files import read_kept, read_specification
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.output_file import check_output, output_file


def export(
    place: RegistryPolicy, version: int | None, *, kind: str, output: Path, trust: bool = False
) -> int:
    """Write a version, or the active one, and return the exit code.

    Raises ConfigurationError for a version whose weights are not here.

    Args:
        place: the policy and its registry.
        version: number; None: the active version.
        kind: format of the file.
        output: file to write.
        trust: the run's folder although it was not made here.
    """
    if kind not in ("safetensors", "onnx"):
        raise ConfigurationError(f"--format {kind!r}: use safetensors or onnx")
    if place.folder is None:
        raise ConfigurationError(
            f"{place.url}: a registry holds no weights; name the run's folder, with --registry beside it"
        )
    check_output(output)
    chosen = _chosen(place, version)
    try:
        blob = read_kept(place.folder, chosen.version, chosen.sha256)
        data = blob if kind == "safetensors" else _onnx(place.folder, chosen, blob, trust=trust)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    with output_file(output, "wb") as file:
        file.write(data)
    sys.stdout.write(f"{output}: version {chosen.version} of {chosen.policy}, {len(data)} bytes\n")
    return EXIT_OK


def _chosen(place: RegistryPolicy, version: int | None) -> PolicyVersion:
    with opened(place) as registry:
        chosen = registry.active(place.policy) if version is None else registry.get(place.policy, version)
    if chosen is None:
        raise ConfigurationError(f"policy={place.policy!r} has no active version: name the one to export")
    return chosen


def _onnx(folder: Path, version: PolicyVersion, blob: bytes, *, trust: bool) -> bytes:
    from penstock.actor.specification.policy_maker import policy_maker
    from penstock.policy.weights import load_into

    try:
        from penstock.policy.onnx_export import to_onnx
    except ImportError as error:
        raise Fatal(f"{error}; {how_to_install('onnx')}") from error
    specification = read_specification(folder)
    # No environment is made: this machine need not have it.
    policy = policy_maker(specification, local_settings(folder, trust=trust).actor)()
    load_into(policy, blob)
    content = {
        "run": version.run,
        "policy": version.policy,
        "version": version.version,
        "sha256": version.sha256,
    }
    masks = [rule.name for rule in specification.schema.tensors if rule.name.startswith("mask/")]
    return to_onnx(policy, {name: str(value) for name, value in content.items()}, masks=masks)
