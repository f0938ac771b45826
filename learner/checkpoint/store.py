"""Checkpoints on disk: written whole or not at all, read only when every byte is as it was written.

A directory `checkpoints/ID` has `tensors.safetensors` (`.lz4` where compressed), `state.json` and, written
last, `manifest.json` with size and SHA-256 of the others. It is made under a temporary name, fsynced and
renamed. The manifest's digest goes into the commit in Redis, so one that was truncated, flipped or exchanged
is refused.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lz4.frame
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from penstock.protocol.limits import check_id
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint
from penstock.runtime.output_file import replace_file, sync_folder

FORMAT: Final = 1
BEST: Final = "evaluation/best"
"""Name of a checkpoint's tensor with the weights of the best evaluation, as the bytes that were published."""
_MANIFEST: Final = "manifest.json"
_TENSORS: Final = "tensors.safetensors"
_COMPRESSED: Final = "tensors.safetensors.lz4"
_STATE: Final = "state.json"
_TEMPORARY: Final = ".tmp-"
_POINTER: Final = "best.json"
_MAX_MANIFEST_BYTES: Final = 64 * 1024

log = logging.getLogger(__name__)


class Damaged(ValueError):
    """Reports a checkpoint that is not whole; the message names directory, file and fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Holds a checkpoint as it was read.

    tensors: by path, on the CPU, in the shape and dtype they were written in. state: JSON object.
    """

    id: str
    manifest_sha256: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The `checkpoints` directory of a run. One process writes it: the holder of the lease.

    compress: tensors are written as an lz4 frame; either kind is read.
    """

    def __init__(self, directory: Path, keep: int, *, compress: bool = False) -> None:
        self.directory = directory
        self.keep = keep
        self._compress = compress
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, checkpoint_id: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> str:
        """Store a checkpoint that then survives loss of power; return the manifest's digest."""
        temporary = self.directory / f"{_TEMPORARY}{checkpoint_id}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            return self._write(checkpoint_id, temporary, tensors, state)
        except OSError as error:
            # What is half-written must not keep a full disk full.
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(error.errno, error.strerror, str(self.directory / checkpoint_id)) from error

    def _write(
        self, checkpoint_id: str, temporary: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> str:
        temporary.mkdir(mode=0o700)
        stored = save_tensors({name: one.detach().cpu().contiguous() for name, one in tensors.items()})
        raw_size = len(stored)
        if self._compress:
            stored = lz4.frame.compress(stored)
        contents = {
            _COMPRESSED if self._compress else _TENSORS: stored,
            _STATE: json.dumps(state, sort_keys=True).encode(),
        }
        for name, data in contents.items():
            _write_durably(temporary / name, data)
        manifest = _manifest(checkpoint_id, contents, raw_size)
        _write_durably(temporary / _MANIFEST, manifest)
        sync_folder(temporary)
        failpoint("rename.before")
        temporary.rename(self.directory / checkpoint_id)
        failpoint("rename.after")
        sync_folder(self.directory)
        return hashlib.sha256(manifest).hexdigest()

    def read(self, checkpoint_id: str, manifest_sha256: str | None = None) -> Checkpoint:
        """Return a checkpoint; raises Damaged unless it is whole and, where given, has that digest."""
        directory = self.directory / checkpoint_id
        manifest = _read(directory / _MANIFEST, _MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(manifest).hexdigest()
        if manifest_sha256 is not None and digest != manifest_sha256:
            raise Damaged(
                f"{directory}: manifest {digest[:12]}… is not the committed {manifest_sha256[:12]}…"
            )
        files = _parse_manifest(directory, manifest, checkpoint_id)
        state = _read_checked(directory, _STATE, files)
        tensors = _read_tensors(directory, files)
        try:
            return Checkpoint(
                id=checkpoint_id,
                manifest_sha256=digest,
                tensors=load_tensors(tensors),
                state=json.loads(state),
            )
        except (SafetensorError, ValueError) as error:
            raise Damaged(f"{directory}: {error}") from error

    def newest(self, candidates: Sequence[tuple[str, str | None]]) -> Checkpoint | None:
        """Return the first of (id, manifest digest) that is whole; log why those before were refused."""
        for checkpoint_id, digest in candidates:
            try:
                return self.read(checkpoint_id, digest)
            except Damaged as error:
                metrics.CHECKPOINTS_REFUSED.inc()
                log.error("checkpoint refused, falling back", extra={"why": str(error)})  # noqa: TRY400 - expected
        return None

    def ids(self) -> list[str]:
        """Return every checkpoint directory, newest first; ids sort by epoch, then by age."""
        names = (path.name for path in self.directory.iterdir() if path.is_dir())
        return sorted((name for name in names if not name.startswith(_TEMPORARY)), reverse=True)

    def name_ignored(self, committed: Sequence[str]) -> None:
        """Log the directories of which Redis has no commit; remove those that a crash left half-written."""
        for path in self.directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.glob(f"{_POINTER}.*.tmp"):
            path.unlink(missing_ok=True)
        for checkpoint_id in self.ids():
            if checkpoint_id not in committed:
                words = {"checkpoint": checkpoint_id}
                log.warning("checkpoint ignored: Redis has no commit of it", extra=words)

    def name_best(self, checkpoint_id: str) -> None:
        if checkpoint_id != self.best():
            pointer = json.dumps({"checkpoint": checkpoint_id}) + "\n"
            replace_file(self.directory / _POINTER, pointer.encode())

    def best(self) -> str:
        """Return the id of the checkpoint of the best evaluation; "" without one, or where power was lost."""
        try:
            return str(json.loads((self.directory / _POINTER).read_bytes())["checkpoint"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""

    def prune(self, lineage: Sequence[str], spared: Collection[str] = ()) -> None:
        """Remove those older than the newest `keep` of the lineage (oldest first), but for the spared."""
        if len(lineage) < self.keep:
            return
        for checkpoint_id in self.ids():
            if checkpoint_id < lineage[-self.keep] and checkpoint_id not in spared:
                shutil.rmtree(self.directory / checkpoint_id, ignore_errors=True)


def bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _manifest(checkpoint_id: str, contents: Mapping[str, bytes], raw_size: int) -> bytes:
    """raw_size: bytes of the tensors before they are compressed."""
    files: dict[str, dict[str, Any]] = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
    }
    if _COMPRESSED in files:
        files[_COMPRESSED]["raw_size"] = raw_size
    return json.dumps({"format": FORMAT, "id": checkpoint_id, "files": files}, sort_keys=True).encode()


def _parse_manifest(directory: Path, manifest: bytes, checkpoint_id: str) -> dict[str, Any]:
    try:
        content = json.loads(manifest)
        known = content["format"] == FORMAT and content["id"] == checkpoint_id
        files: dict[str, Any] = content["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{directory / _MANIFEST}: not a manifest ({error})") from error
    if not known:
        raise Damaged(f"{directory / _MANIFEST}: not format {FORMAT} of {checkpoint_id}")
    return files


def _read_tensors(directory: Path, files: dict[str, Any]) -> bytes:
    if _COMPRESSED not in files:
        return _read_checked(directory, _TENSORS, files)
    stored, path = _read_checked(directory, _COMPRESSED, files), directory / _COMPRESSED
    try:
        size = int(files[_COMPRESSED]["raw_size"])
        # One byte more than was written is enough to see a frame that would become more.
        raw: bytes = lz4.frame.LZ4FrameDecompressor().decompress(stored, max_length=size + 1)
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise Damaged(f"{path}: no lz4 frame of the size in the manifest ({error})") from error
    if len(raw) != size:
        raise Damaged(f"{path}: becomes {len(raw)} bytes, {size} were written")
    return raw


def _read_checked(directory: Path, name: str, files: Mapping[str, Any]) -> bytes:
    try:
        size, digest = int(files[name]["size"]), str(files[name]["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{directory / _MANIFEST}: does not describe {name}") from error
    data = _read(directory / name, size)
    if len(data) != size:
        raise Damaged(f"{directory / name}: {len(data)} bytes, {size} were written")
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged(f"{directory / name}: its SHA-256 is not the one in the manifest")
    return data


def _read(path: Path, at_most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(at_most + 1)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    if len(data) > at_most:
        raise Damaged(f"{path}: more than the {at_most} bytes it should have")
    return data


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        failpoint("write.before")
        file.write(data)
        failpoint("write.after")
        file.flush()
        failpoint("fsync.before")
        os.fsync(file.fileno())
        failpoint("fsync.after")


# ---- Checkpoints that an operator has named: restored from, never resumed from, never pruned.

FOLDER: Final = "named-checkpoints"
MAX_NAMED: Final = 32
"""The bound on a run's disk: as many checkpoints beside those that are resumed from."""
_COMMAND: Final = "command"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NameRefused(Exception):
    """Reports a name that another checkpoint has, or that none has; the message names the remedy."""


class NoRoom(Exception):
    """Reports that one more named checkpoint is not allowed, or does not fit; the message says which."""


class NamedCheckpoints:
    """The folder of a run. One process writes it: the holder of the lease."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / FOLDER

    def names(self) -> list[str]:
        return sorted(self._store().ids()) if self._directory.is_dir() else []

    def keep(self, name: str, command: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Store a checkpoint under a name; it then survives loss of power.

        A command that is repeated after a crash finds what it stored before. command: its request id. Raises
        NameRefused where another command gave the name; NoRoom where MAX_NAMED have names, or the disk is
        full.
        """
        names = self.names()
        if check_id("name", name) in names:
            if self._store().read(name).state.get(_COMMAND) != command:
                raise NameRefused(
                    f"name={name!r}: a checkpoint has it already; choose another, or remove "
                    f"{self._directory / name}"
                )
            return
        if len(names) >= MAX_NAMED:
            raise NoRoom(
                f"{len(names)} checkpoints have names, at most {MAX_NAMED} may: remove a folder from "
                f"{self._directory}"
            )
        try:
            self._store().write(name, tensors, {**state, _COMMAND: command})
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NoRoom(f"{self._directory}: {error.strerror}; make room") from error

    def read(self, name: str) -> Checkpoint:
        """Return the checkpoint of a name; raises NameRefused, with the names there are, or Damaged."""
        names = self.names()
        if name not in names:
            raise NameRefused(f"name={name!r}: no checkpoint has it; there are: {', '.join(names) or 'none'}")
        return self._store().read(name)

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._directory, keep=MAX_NAMED)
