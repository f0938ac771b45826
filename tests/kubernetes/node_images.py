"""The images of a node without a registry or a builder: an archive, whose layers are folders.

The stages of our Dockerfiles are carried out with their own commands, in a root of Debian 12 that stands for
`python:3.11-slim-bookworm`. Redis and PostgreSQL are Debian's, under the names that the manifests use.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.deploy.dockerfiles import NAMES, VENV, path_of, stages
from tests.deploy.manifests import KUBERNETES, ROOT, render
from tests.deploy.node.images import POSTGRES_ENTRY_POINT, SYSTEM_PATH
from tests.kubernetes.node_root import bootstrap, cache_folder, run

PACKAGES: Final = (
    *("python3", "python3-venv", "redis-server", "redis-tools", "postgresql-15", "ca-certificates", "procps"),
)
LIBRARY: Final = "docker.io/library/"
"""What containerd puts before a name without a registry."""
_OCI: Final = "application/vnd.oci.image"
POSTGRESQL: Final = "/usr/lib/postgresql/15/bin"
USER: Final = "65532:65532"
ENTRY_POINT: Final = "usr/local/bin/postgres-entry"
BUILD: Final = """
set -eu
mount -t overlay -o "lowerdir=$BASE,upperdir=$CHANGED,workdir=$SCRATCH" overlay "$MERGED"
mount -t proc proc "$MERGED/proc"
mount --rbind /dev "$MERGED/dev"
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    test -e "$file" || continue
    touch "$MERGED$file"
    mount --bind "$file" "$MERGED$file"
done
exec chroot "$MERGED" sh -c "cd $FOLDER && $COMMAND"
"""
"""A stage's command, in the base with what the stage has copied. The way to packages is this machine's."""
LEFT_OUT: Final = (
    "proc/*",
    "sys/*",
    "dev/*",
    "var/cache/*",
    "var/lib/apt/*",
    "usr/share/doc/*",
    "usr/share/locale/*",
)
REDIS_COMMAND: Final = ("redis-server", "--version")


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str
    path: Path


def node_images(tags: tuple[str, ...]) -> Path:
    """An archive of every image that the overlays name, ours under each of the tags."""
    cache = cache_folder()
    base = _base_root(cache)
    layers = cache / "layers"
    layers.mkdir(exist_ok=True)
    root = _layer(layers, f"base-{base.name}", lambda: base, LEFT_OUT)
    ours = {name: _ours(layers, base, name) for name in NAMES}
    key = hashlib.sha256(
        json.dumps([tags, root.digest, [ours[name].digest for name in NAMES], _manifest_images()]).encode()
    )
    archive = cache / f"images-{key.hexdigest()[:16]}.tar"
    if not archive.exists():
        for old in cache.glob("images-*.tar"):
            old.unlink()
        _Archive(archive).write(root, ours, tags, _redis_version(base))
    return archive


def _manifest_images() -> list[str]:
    text = json.dumps(render(KUBERNETES / "overlays" / "local"))
    found = {word for word in text.replace('"', " ").split() if word.startswith(("redis:", "postgres:"))}
    return sorted(found)


def _base_root(cache: Path) -> Path:
    key = hashlib.sha256(" ".join((*PACKAGES, POSTGRES_ENTRY_POINT)).encode()).hexdigest()[:16]
    root = cache / f"base-{key}"
    if root.is_dir():
        return root
    making = root.with_name(f"{root.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.parent.mkdir(parents=True, exist_ok=True)
    bootstrap(making, "bookworm", PACKAGES)
    entry = making / ENTRY_POINT
    entry.write_text(f"#!/bin/sh{POSTGRES_ENTRY_POINT}")
    entry.chmod(0o755)
    (making / "usr/local/bin/python").symlink_to("/usr/bin/python3")  # as in the image that it stands for
    user, group = USER.split(":")
    with (making / "etc/passwd").open("a") as file:
        file.write(f"penstock:x:{user}:{group}::/tmp:/bin/sh\n")
    with (making / "etc/group").open("a") as file:
        file.write(f"penstock:x:{group}:\n")
    making.rename(root)
    return root


def _redis_version(base: Path) -> str:
    said = subprocess.run(
        ["chroot", str(base), *REDIS_COMMAND], capture_output=True, text=True, check=True
    ).stdout
    return next(word.removeprefix("v=") for word in said.split() if word.startswith("v="))


def _ours(layers: Path, base: Path, name: str) -> Layer:
    """The layer of one of our images: what its last stage copies from the one that builds."""
    key = hashlib.sha256(path_of(name).read_bytes() + base.name.encode())
    sources = [word for value in stages(name)[0].values("COPY") for word in value.split()[:-1]]
    for path in sorted(file for source in sources for file in _files(ROOT / source)):
        key.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    work = layers.with_name(f"{name}.making")

    def build() -> Path:
        shutil.rmtree(work, ignore_errors=True)
        for part in ("changed", "scratch", "merged"):
            (work / part).mkdir(parents=True)
        _build(base, work, name)
        return work / "changed"

    layer = _layer(layers, f"{name}-{key.hexdigest()[:16]}", build, (), only=VENV.lstrip("/"))
    shutil.rmtree(work, ignore_errors=True)
    return layer


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _build(base: Path, work: Path, name: str) -> None:
    """The instructions of the first stage, one by one. Where they install torch, the tests' own is there."""
    changed, folder = work / "changed", "/"
    arguments = {"CUDA": "false"}
    for kind, value in stages(name)[0].instructions:
        if kind == "ARG":
            key, _, default = value.partition("=")
            arguments.setdefault(key, default.strip('"'))
        elif kind == "WORKDIR":
            folder = value
            (changed / folder.lstrip("/")).mkdir(parents=True)
        elif kind == "COPY":
            *sources, target = value.split()
            for source in sources:
                _copy(ROOT / source, changed / folder.lstrip("/") / target)
        elif kind == "RUN":
            if "import torch" in value:
                _copy_torch(changed / VENV.lstrip("/") / "lib" / "python3.11" / "site-packages")
            variables = {"FOLDER": folder, "COMMAND": value, "PATH": SYSTEM_PATH, "HOME": "/root"}
            places = {name.upper(): str(work / name) for name in ("changed", "scratch", "merged")}
            run("unshare", "--mount", "sh", "-c", BUILD, BASE=str(base), **places, **arguments, **variables)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy2(source, target)


def _copy_torch(packages: Path) -> None:
    assert sys.version_info[:2] == (3, 11), (
        "the images have Python 3.11, and so must the tests that give them torch"
    )
    packages.mkdir(parents=True)
    found = metadata.distribution("torch")
    for name in {Path(file).parts[0] for file in found.files or () if ".." not in Path(file).parts}:
        if name != "__pycache__":
            _copy(Path(str(found.locate_file(name))), packages / name)


def _layer(
    layers: Path, name: str, make: Callable[[], Path], left_out: tuple[str, ...], only: str = "."
) -> Layer:
    """The tar file of a folder, made unless it is there; a layer of the same image by another key goes."""
    kept = layers / f"{name}.tar"
    if not kept.exists():
        for old in layers.glob(f"{name.rpartition('-')[0]}-*"):
            old.unlink()
        making = layers / "making.tar"
        words = [f"--exclude=./{pattern}" for pattern in left_out]
        order = ("--numeric-owner", "--sort=name", "--mtime=@0")
        run("tar", *order, "--create", f"--file={making}", f"--directory={make()}", *words, only)
        making.rename(kept)
    digest = layers / f"{name}.sha256"
    if not digest.exists():
        with kept.open("rb") as file:
            digest.write_text(hashlib.file_digest(file, "sha256").hexdigest())
    return Layer(digest.read_text(), kept)


class _Archive:
    def __init__(self, path: Path) -> None:
        self._path, self._folder = path, path.with_suffix(".making")
        self._blobs = self._folder / "blobs" / "sha256"
        self._manifests: list[dict[str, object]] = []

    def write(self, root: Layer, ours: dict[str, Layer], tags: tuple[str, ...], redis: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._blobs.mkdir(parents=True)
        for layer in (root, *ours.values()):
            if not (self._blobs / layer.digest).exists():
                os.link(layer.path, self._blobs / layer.digest)
        path = f"PATH={SYSTEM_PATH}"
        for name, layer in ours.items():
            self._image(
                [f"penstock-{name}:{tag}" for tag in tags], [root, layer], self._config_of(name, redis)
            )
        self._image(["base:1"], [root], {"Env": [path]})
        self._image(["pause:1"], [root], {"Env": [path], "Entrypoint": ["sleep", "infinity"], "User": USER})
        for name in _manifest_images():
            if name.startswith("redis:"):
                self._image([name], [root], {"Env": [path]})
            else:
                variables = [f"PATH={POSTGRESQL}:{SYSTEM_PATH}", "LANG=C.UTF-8"]
                self._image([name], [root], {"Env": variables, "Entrypoint": [f"/{ENTRY_POINT}"]})
        (self._folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        index = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": self._manifests}
        (self._folder / "index.json").write_text(json.dumps(index))
        run(
            "tar",
            "--create",
            f"--file={self._path}.part",
            f"--directory={self._folder}",
            "oci-layout",
            "index.json",
            "blobs",
        )
        Path(f"{self._path}.part").rename(self._path)
        shutil.rmtree(self._folder)

    def _config_of(self, name: str, redis: str) -> dict[str, object]:
        final = stages(name)[-1]
        (variables,) = final.values("ENV")
        (user,) = final.values("USER")
        (entry_point,) = final.values("ENTRYPOINT")
        environment = [
            *variables.replace("$PATH", SYSTEM_PATH).split(),
            f"PENSTOCK_BROKER__PATCHED_REDIS={redis}",
        ]
        return {"Env": environment, "User": user, "Entrypoint": json.loads(entry_point)}

    def _image(self, names: list[str], layers: list[Layer], config: dict[str, object]) -> None:
        ids = [f"sha256:{layer.digest}" for layer in layers]
        told = {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "history": [],
            "rootfs": {"type": "layers", "diff_ids": ids},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": self._blob("config", told),
            "layers": [
                {"mediaType": f"{_OCI}.layer.v1.tar", "digest": each, "size": layer.path.stat().st_size}
                for each, layer in zip(ids, layers, strict=True)
            ],
        }
        for name in names:
            annotations = {
                "io.containerd.image.name": LIBRARY + name,
                "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            }
            platform = {"os": "linux", "architecture": "amd64"}
            self._manifests.append(
                {**self._blob("manifest", manifest), "platform": platform, "annotations": annotations}
            )

    def _blob(self, kind: str, told: Mapping[str, object]) -> dict[str, object]:
        data = json.dumps(told).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return {"mediaType": f"{_OCI}.{kind}.v1+json", "digest": f"sha256:{digest}", "size": len(data)}
