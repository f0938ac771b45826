"""Generate `penstock/v1` from the `.proto` files beside this script.

python protos/generate.py           write the stubs
python protos/generate.py --check   write nothing; exit 1 naming the files that regenerating would change
"""

import filecmp
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent
PACKAGE = Path("penstock") / "v1"
MARKER = '"""Generated from protos/penstock/v1 by protos/generate.py; do not edit."""\n'


def generate(out: Path) -> None:
    """Write stubs and `.pyi` files of every `.proto` under `out/penstock/v1`.

    Raises RuntimeError when the compiler refuses a file; its message is on stderr.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    package = out / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(MARKER)
    protos = sorted(str(path) for path in (SOURCES / PACKAGE).glob("*.proto"))
    google = Path(grpc_tools.__file__).parent / "_proto"
    flags = ("--python_out", "--grpc_python_out", "--mypy_out=quiet", "--mypy_grpc_out=quiet")
    outputs = [f"{flag}:{out}" if "=" in flag else f"{flag}={out}" for flag in flags]
    if protoc.main(["protoc", f"-I{SOURCES}", f"-I{google}", *outputs, *protos]) != 0:
        raise RuntimeError("protoc refused the .proto files, see above")
    for stub in package.glob("*_pb2_grpc.py"):
        if "class " not in stub.read_text():
            # The compiler writes one for every file, also where there is no service.
            stub.unlink()
            stub.with_suffix(".pyi").unlink()


def drift(checked_in: Path) -> list[str]:
    """Names of the files in `checked_in` that regenerating would change, add or remove."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / PACKAGE
        names = {path.name for folder in (fresh, checked_in) for path in folder.glob("*.py*")}
        _, differing, missing = filecmp.cmpfiles(fresh, checked_in, names, shallow=False)
        return sorted(differing + missing)


def main() -> int:
    """Exit status: 0, or 1 when `--check` found a difference."""
    root = SOURCES.parent
    if sys.argv[1:] != ["--check"]:
        generate(root)
        return 0
    stale = drift(root / PACKAGE)
    if stale:
        print(f"run `make protos`, these are not what the .proto files say: {', '.join(stale)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
