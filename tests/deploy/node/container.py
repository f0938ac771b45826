"""One container: a root of its own that is read-only, what the pod mounts, no privilege.

Then the real command.

A program, started inside its pod's network: `python -m tests.deploy.node.container SPEC.json`. It makes the
root in memory out of the programs of this machine, in place of the image, puts the volumes at the paths that
the manifest names, and becomes the command. Whatever the manifest does not mount is not there, or cannot be
written to.
"""

import ctypes
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH: Final = 2
KEPT_FLAGS: Final = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME
"""What a mount of a stricter owner has must be said again when it is changed."""
DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to become.

    user: the number that it has inside. programs: folders of this machine, in place of the image.
    """

    command: list[str]
    environment: dict[str, str]
    mounts: list[Mount]
    programs: list[str]
    etc: dict[str, str]
    root: str
    user: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Spec":
        content = json.loads(path.read_text())
        return cls(**{**content, "mounts": [Mount(**one) for one in content["mounts"]]})


def mount(source: str, target: Path, flags: int, kind: str = "") -> None:
    if _libc.mount(source.encode(), str(target).encode(), kind.encode() or None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    """`source` at `target`, which is made."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, MS_BIND | MS_REC)
    if read_only:
        seal(target)


def seal(target: Path) -> None:
    kept = os.statvfs(target).f_flag & KEPT_FLAGS
    mount("", target, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def make_root(spec: Spec) -> Path:
    root = Path(spec.root)
    root.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", root, 0, "tmpfs")
    for name in ("etc", "proc", "tmp", "var", "run", "dev/shm"):
        (root / name).mkdir(parents=True)
    (root / "var" / "run").symlink_to("/run")
    for name, text in spec.etc.items():
        (root / "etc" / name).write_text(text)
    bind(Path("/etc/ld.so.cache"), root / "etc" / "ld.so.cache", read_only=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).is_dir():
            bind(Path("/", name), root / name, read_only=True)
    for name in DEVICES:
        bind(Path("/dev", name), root / "dev" / name, read_only=False)
    mount("tmpfs", root / "dev" / "shm", 0, "tmpfs")
    mount("/proc", root / "proc", MS_BIND | MS_REC)
    for one in spec.mounts:
        bind(Path(one.source), inside(root, one.target), read_only=one.read_only)
    for program in spec.programs:
        bind(Path(program), inside(root, program), read_only=True)
    seal(root)
    return root


def inside(root: Path, target: str) -> Path:
    """A path of the container as this process reaches it; links in it are of the container."""
    path = root
    for part in Path(target).parts[1:]:
        path = path / part
        if path.is_symlink():
            path = root / str(path.readlink()).lstrip("/")
    return path


def enter(root: Path) -> None:
    mount("", Path("/"), MS_REC | MS_PRIVATE)
    os.chdir(root)
    if _libc.pivot_root(b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    if _libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount")
    os.chdir("/")


def main(spec: Spec) -> None:
    enter(make_root(spec))
    user = str(spec.user)
    jail = [
        "unshare",
        "--user",
        f"--map-user={user}",
        f"--map-group={user}",
        "--",
        "setpriv",
        "--no-new-privs",
        "--",
    ]
    os.execvpe(jail[0], [*jail, *spec.command], spec.environment)  # noqa: S606 - the command is the manifest's


if __name__ == "__main__":
    main(Spec.read(Path(sys.argv[1])))
