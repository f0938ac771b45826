"""Weights of registered versions as files of a run's folder, so that they can be served without a broker.

    runs/NAME/registry.sqlite                 the versions (unless `registry.url` names another one)
    runs/NAME/policies/VERSION.safetensors    the bytes of each that is kept
    runs/NAME/policies/latest                 a link to the newest of them, at the end to the final policy
    runs/NAME/policies/policy.json            the run's specification, from its start on
    runs/NAME/policies/learner.lock           held by the learner of the run while it lives

A file is complete and on disk before its version is registered with its digest; bytes that do not match the
digest are never returned. One process writes here at a time: the learner or, after its end, the holder of the
lock. Loads neither torch nor SQLAlchemy.
"""

import base64
import fcntl
import hashlib
import json
import os
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, BinaryIO, Final

from penstock.config.run_folder import open_regular, opened_folder, opener
from penstock.protocol.specification import RunSpecification
from penstock.registry.records import PolicyVersion
from penstock.runtime.output_file import replace_file

FOLDER: Final = "policies"
DESCRIPTION: Final = "policy.json"
LATEST: Final = "latest"
_SUFFIX: Final = ".safetensors"
_LOCK: Final = "learner.lock"


def registry_url(run_dir: Path, configured: str = "") -> str:
    return configured or f"sqlite:///{run_dir.resolve() / 'registry.sqlite'}"


def path_of(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f"{version}{_SUFFIX}"


def write_kept(run_dir: Path, version: int, blob: bytes) -> None:
    """Write a version's weights, whole and on disk when this returns; raises OSError."""
    replace_file(path_of(run_dir, version), blob)
    name_latest(run_dir, path_of(run_dir, max(kept_files(run_dir))).name)


def name_latest(run_dir: Path, name: str) -> None:
    """Point the link `latest` to a file of its folder, atomically; raises OSError."""
    with opened_folder(run_dir / FOLDER / LATEST) as here:
        with suppress(OSError):  # it is absent, or not a link
            if os.readlink(LATEST, dir_fd=here) == name:
                return
        temporary = f"{LATEST}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=here)
        os.symlink(name, temporary, dir_fd=here)
        os.replace(temporary, LATEST, src_dir_fd=here, dst_dir_fd=here)


def read_kept(run_dir: Path, version: int, sha256: str) -> bytes:
    with _opened(run_dir, version) as file:
        blob = file.read()
    _check(path_of(run_dir, version), hashlib.sha256(blob).hexdigest(), sha256)
    return blob


def open_kept(run_dir: Path, version: PolicyVersion) -> BinaryIO:
    """Open the weights of a version, which may exceed memory; raises ValueError for damaged weights."""
    file = _opened(run_dir, version.version)
    try:
        # Other users may have put a file of any length here.
        is_as_long = os.fstat(file.fileno()).st_size == version.size_bytes
        found = hashlib.file_digest(file, "sha256").hexdigest() if is_as_long else "of another length"
        _check(path_of(run_dir, version.version), found, version.sha256)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def _opened(run_dir: Path, version: int) -> BufferedReader:
    path = path_of(run_dir, version)
    try:
        return open_regular(path)
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}: the weights of version {version} are not in this folder; "
            "is it the folder of the run that registered them, and is the version not retired?"
        ) from error


def _check(path: Path, found: str, registered: str) -> None:
    if found != registered:
        raise ValueError(
            f"{path}: damaged: its SHA-256 is {found}, registered is {registered}; "
            "promote another version, and retire this one"
        )


def kept_files(run_dir: Path) -> set[int]:
    stems = (path.name.removesuffix(_SUFFIX) for path in (run_dir / FOLDER).glob(f"*{_SUFFIX}"))
    return {int(stem) for stem in stems if stem.isdecimal()}


def forget_kept(run_dir: Path, version: int) -> None:
    """Remove the weights of a version that the registry has retired."""
    path = path_of(run_dir, version)
    path.unlink(missing_ok=True)
    link, left = run_dir / FOLDER / LATEST, kept_files(run_dir)
    if link.is_symlink() and link.readlink() == Path(path.name):
        if left:
            name_latest(run_dir, path_of(run_dir, max(left)).name)
        else:
            link.unlink()


def forget_unfinished(run_dir: Path) -> None:
    """Remove incomplete files of a crash."""
    for path in (run_dir / FOLDER).glob(f"*{_SUFFIX}.*tmp"):
        path.unlink(missing_ok=True)


def read_specification(run_dir: Path) -> RunSpecification:
    """Return the specification of a run, which may still be running; raises ValueError."""
    path = run_dir / FOLDER / DESCRIPTION
    try:
        encoded = json.loads(path.read_bytes())["specification"]
        return RunSpecification.decode(base64.b64decode(encoded))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: not there; is it the folder of a run whose learner has begun?") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: cannot be read as the description of a run ({error}); resume the run to repair it"
        ) from error


def hold(run_dir: Path) -> IO[str] | None:
    """Lock the folder until the returned file is closed; None while a learner of the run is alive."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _LOCK, "a", opener=opener)  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
