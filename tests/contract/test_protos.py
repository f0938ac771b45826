import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos" / "penstock" / "v1").glob("*.proto"))
STUBS = ROOT / "penstock" / "v1"


@pytest.fixture
def generator() -> ModuleType:
    """The script that writes the stubs."""
    specification = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_regenerating_the_stubs_changes_nothing(generator: ModuleType) -> None:
    assert generator.drift(STUBS) == []


def test_a_stub_that_was_edited_is_named(generator: ModuleType, tmp_path: Path) -> None:
    generator.generate(tmp_path)
    stubs = tmp_path / "penstock" / "v1"
    (stubs / "weights_pb2.py").write_text("edited")
    (stubs / "old_pb2.py").write_text("")
    (stubs / "tensor_pb2.pyi").unlink()
    assert generator.drift(stubs) == ["old_pb2.py", "tensor_pb2.pyi", "weights_pb2.py"]


def test_no_stub_is_kept_that_holds_no_service() -> None:
    services = {path.stem for path in PROTOS if "\nservice " in path.read_text()}
    assert {path.name.removesuffix("_pb2_grpc.py") for path in STUBS.glob("*_pb2_grpc.py")} == services


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_declaration_is_commented(path: Path) -> None:
    lines = path.read_text().splitlines()
    declaration = re.compile(r"\s*(message|enum|service|rpc|oneof|repeated|map<|\w+ \w+ = |[A-Z_0-9]+ = )")
    bare = [
        line.strip()
        for before, line in zip(["", *lines], lines, strict=False)
        if declaration.match(line) and not line.startswith("syntax") and not before.strip().startswith("//")
    ]
    assert bare == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_field_numbers_have_no_holes(path: Path) -> None:
    module = importlib.import_module(f"penstock.v1.{path.stem}_pb2")
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        taken = {field.number for field in message.field}
        taken |= {number for span in message.reserved_range for number in range(span.start, span.end)}
        assert taken == set(range(1, len(taken) + 1)), message.name


def test_the_stubs_need_no_newer_libraries_than_the_declared_floors() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for path in STUBS.glob("*_pb2_grpc.py"):
        wanted = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert wanted is not None
        assert f'"grpcio>={wanted[1]}"' in declared
    for path in STUBS.glob("*_pb2.py"):
        wanted = re.search(r"Protobuf Python Version: ([\d.]+)", path.read_text())
        assert wanted is not None
        assert f'"protobuf>={wanted[1]}"' in declared
