"""Generate `penstock/v1` from the `.proto` files beside this script: `python protos/generate.py [OUT]`."""

import os
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent
MARKER = '"""Generated from protos/penstock/v1 by protos/generate.py; do not edit."""\n'


def generate(out: Path) -> None:
    """Write stubs and `.pyi` files of every `.proto` under `out/penstock/v1`.

    Raises RuntimeError when the compiler refuses a file; its message is on stderr.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    package = out / "penstock" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(MARKER)
    protos = sorted(str(path) for path in (SOURCES / "penstock" / "v1").glob("*.proto"))
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


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent)
