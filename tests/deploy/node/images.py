"""What stands for the images: this machine's programs, and what their entry points do.

Ours are Python and the packages that these tests run with. Redis and PostgreSQL are this machine's. Where its
Redis is older than what brokers accept over TCP, ours are told that its vendor has patched it: the one
setting that the manifests do not hold.
"""

import shutil
import site
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.broker.log.connection import UnsuitableRedis, check_version
from tests.deploy.dockerfiles import VENV, stages
from tests.deploy.manifests import ROOT
from tests.support.storage.guarded_redis import tls_binary
from tests.support.storage.postgresql_server import find_programs
from tests.support.storage.redis_server import Binary, find_binaries

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NAMESPACES: Final = (
    *("unshare", "--user", "--map-root-user", "--mount", "--net"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""In which a node runs: what it mounts and connects is its own, and ends with it."""

POSTGRES_ENTRY_POINT: Final = """
set -eu
if ! test -s "$PGDATA/PG_VERSION"; then
    mkdir -p "$PGDATA"
    initdb --pgdata "$PGDATA" --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" \
        --auth-local=trust --auth-host=scram-sha-256 --no-sync
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE \\"$POSTGRES_DB\\"" | postgres --single -D "$PGDATA" -j postgres
fi
exec "$@"
"""
"""As the official image's does it: the first start makes the database of the variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """command: what an entry point puts before the arguments. programs: folders to show.

    names_its_user: gives whatever user it runs as a name. Others do not know the number that a manifest says.
    """

    entry_point: tuple[str, ...]
    environment: dict[str, str]
    programs: tuple[str, ...]
    names_its_user: bool = False


def image(reference: str) -> Image:
    name = reference.rpartition("/")[2].partition(":")[0]
    if name.startswith("penstock-"):
        return _ours(name.removeprefix("penstock-"))
    if name == "redis":
        folder = str(Path(_redis().path).parent)
        return _image((), f"{folder}:{SYSTEM_PATH}", folder)
    if name == "postgres":
        programs = find_programs()
        assert programs is not None, "no PostgreSQL"
        entry_point = ("sh", "-c", POSTGRES_ENTRY_POINT, "entry-point")
        found = _image(entry_point, f"{programs}:{SYSTEM_PATH}", str(programs.parent))
        found.environment["LANG"] = "C.UTF-8"  # the official image's is UTF-8 as well
        return replace(found, names_its_user=True)
    raise AssertionError(f"image {reference} is not known here")


def _ours(name: str) -> Image:
    """The ENV of its Dockerfile; Python with what it imports from, wherever that lies."""
    folders = {str(ROOT), sys.prefix, sys.base_prefix, *site.getsitepackages()}
    folders |= {path for path in sys.path if path and Path(path).is_dir()}
    (variables,) = stages(name)[-1].values("ENV")
    environment = dict(word.partition("=")[::2] for word in variables.split())
    path = environment.pop("PATH").replace(f"{VENV}/bin", str(Path(sys.executable).parent))
    found = _image((), path.replace("$PATH", SYSTEM_PATH), *_outermost(folders))
    found.environment.update(environment)
    redis = _redis()
    try:
        check_version(redis.version, private=False)
    except UnsuitableRedis:
        found.environment["PENSTOCK_BROKER__PATCHED_REDIS"] = redis.version
    return found


def _redis() -> Binary:
    binary = tls_binary()
    assert binary is not None, f"no redis-server with TLS among {find_binaries()}"
    return binary


def _image(entry_point: tuple[str, ...], path: str, *programs: str) -> Image:
    folders = ["/usr", *(one for one in programs if not one.startswith("/usr/"))]
    return Image(entry_point=entry_point, environment={"PATH": path}, programs=tuple(folders))


def _outermost(folders: set[str]) -> list[str]:
    return sorted(one for one in folders if not any(one.startswith(f"{other}/") for other in folders))


def absent() -> str:
    """What this machine lacks, with the package that has it; "" when nothing."""
    needed = {
        "kubectl": "kubernetes-client",
        "redis-cli": "redis-tools",
        "ip": "iproute2",
        "unshare": "util-linux",
        "nsenter": "util-linux",
        "setpriv": "util-linux",
    }
    for program, package in needed.items():
        if shutil.which(program) is None:
            return f"no {program} on PATH (Debian: {package})"
    if tls_binary() is None:
        return "no redis-server with TLS (Debian: redis-server)"
    if find_programs() is None:
        return "no PostgreSQL (Debian: postgresql)"
    trial = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return "" if trial.returncode == 0 else f"no namespaces here: {trial.stderr.strip()}"
