"""The root of a node: Debian's packages, and Kubernetes built from an archive of its source.

Both are kept in the cache, by what they are made of: about 10 minutes the first time, nothing afterwards.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.deploy.manifests import ROOT

SOURCE_VARIABLE: Final = "PENSTOCK_KUBERNETES_SOURCE"
CACHE_VARIABLE: Final = "PENSTOCK_KUBERNETES_CACHE"
MIRROR_VARIABLE: Final = "PENSTOCK_DEBIAN_MIRROR"
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
PACKAGES: Final = (
    *("ca-certificates", "golang-1.26-go", "etcd-server", "etcd-client", "containerd", "runc"),
    *("containernetworking-plugins", "iptables", "nftables", "conntrack", "iproute2", "util-linux", "mount"),
    *("procps", "kmod", "ethtool", "socat", "kubernetes-client"),
)
VERSION: Final = "v1.36.2"
APART: Final = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""Before a command that mounts: its mounts and all of its processes end with this one, however that ends."""
_BUILD: Final = """
set -eu
mount -t proc proc "$ROOT/proc"
mount --bind /dev "$ROOT/dev"
exec chroot "$ROOT" bash -euc '
export HOME=/root PATH=/usr/lib/go-1.26/bin:$PATH GOCACHE=/build-cache GOPROXY=off
export GOFLAGS="-mod=vendor -trimpath"
export GOTOOLCHAIN=local GOTELEMETRY=off CGO_ENABLED=0
mkdir -p /out
cd /source
version=k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=$VERSION -X $version.gitMajor=1 -X $version.gitMinor=${VERSION:3:2}"
for name in $PROGRAMS; do go build -ldflags "$flags" -o "/out/$name" "./cmd/$name"; done
rm -rf /build-cache /source /usr/lib/go-1.26
'
"""


def cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else ROOT / ".cache" / "kubernetes"


def mirror() -> tuple[str, ...]:
    given = os.environ.get(MIRROR_VARIABLE)
    return (given,) if given else ()


def source_archive() -> Path | None:
    given = os.environ.get(SOURCE_VARIABLE)
    return Path(given) if given else None


def node_root(source: Path) -> Path:
    """The root with its binaries, made if the cache has none."""
    key = hashlib.sha256(source.read_bytes())
    key.update(" ".join((*PACKAGES, _BUILD)).encode())
    root = cache_folder() / f"node-{key.hexdigest()[:16]}"
    if root.is_dir():
        return root
    making = root.with_name(f"{root.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.parent.mkdir(parents=True, exist_ok=True)
    bootstrap(making, "unstable", PACKAGES)
    (making / "source").mkdir()
    run("tar", "--extract", f"--file={source}", f"--directory={making / 'source'}")
    environment = {"ROOT": str(making), "VERSION": VERSION, "PROGRAMS": " ".join(PROGRAMS)}
    run(*APART, "bash", "-c", _BUILD, **environment)
    making.rename(root)
    return root


def bootstrap(root: Path, suite: str, packages: tuple[str, ...]) -> None:
    """A Debian in a folder. An index that a mirror renews seldom is taken as it is."""
    words = [
        "--variant=minbase",
        '--aptopt=Acquire::Check-Valid-Until "false"',
        f"--include={','.join(packages)}",
    ]
    run(*APART, "mmdebstrap", *words, suite, str(root), *mirror())


def run(*words: str, **variables: str) -> None:
    """A command that must end well; raises AssertionError with the end of what it said."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **variables}, errors="replace"
    )
    assert done.returncode == 0, f"{' '.join(words)[:200]}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
