import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import gymnasium as gym
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from penstock.protocol.refusal import Reason
from tests.support.serving import node_client
from tests.support.serving.scripted_server import ScriptedServer, refuses, serving

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos" / "penstock" / "v1").glob("*.proto"))
STUBS = ROOT / "penstock" / "v1"


def test_a_stub_that_was_edited_is_named(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    generator = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generator)
    assert generator.drift(STUBS) == []
    generator.generate(tmp_path)
    stubs = tmp_path / "penstock" / "v1"
    (stubs / "weights_pb2.py").write_text("edited")
    (stubs / "old_pb2.py").write_text("")
    (stubs / "tensor_pb2.pyi").unlink()
    assert generator.drift(stubs) == ["old_pb2.py", "tensor_pb2.pyi", "weights_pb2.py"]


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


BUF: Final = Path(sys.executable).with_name("buf")


def _breaking(protos: Path) -> str:
    """What buf complains of, a line each; "" when nothing is broken."""
    command = [str(BUF), "breaking", str(protos), "--against", str(ROOT / "protos" / "released.binpb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or done.stdout, done.stderr
    return done.stdout


@pytest.mark.skipif(not BUF.exists(), reason="no buf for this machine (PyPI: buf-bin)")
def test_no_released_message_is_broken() -> None:
    assert _breaking(ROOT / "protos") == ""


@pytest.mark.skipif(not BUF.exists(), reason="no buf for this machine (PyPI: buf-bin)")
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("uint32 batch = 4;", "", 'field "4" with name "batch"'),
        ("uint32 batch = 4;", "string batch = 4;", 'changed type from "uint32" to "string"'),
        ("uint32 batch = 4;", "uint32 rows = 4;", 'changed name from "batch" to "rows"'),
    ],
)
def test_changes_that_would_break_a_client_are_found(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    shutil.copytree(ROOT / "protos" / "penstock", tmp_path / "penstock")
    policy = tmp_path / "penstock" / "v1" / "policy.proto"
    text = policy.read_text()
    assert text.count(old) == 1
    policy.write_text(text.replace(old, new))
    assert complaint in _breaking(tmp_path)


TRAJECTORY = """
import { CartPole } from './cartpole.js';
const { state, actions } = JSON.parse(process.argv[1]);
const environment = new CartPole();
environment.state = state;
console.log(JSON.stringify(actions.map((action) => {
  const { observation, terminated } = environment.step(action);
  return [...observation, Number(terminated)];
})));
"""


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server with the spaces of CartPole, which answers as the test says."""
    async with serving() as scripted:
        yield scripted


def test_the_physics_are_those_of_gymnasium() -> None:
    environment = gym.make("CartPole-v1").unwrapped
    first, _ = environment.reset(seed=3)
    state = [float(number) for number in environment.state]  # type: ignore[attr-defined]
    actions = [int(number) for number in np.random.default_rng(3).integers(0, 2, 12)]
    expected = []
    for action in actions:
        observation, _, terminated, _, _ = environment.step(action)
        expected.append([*observation, float(terminated)])
    done = subprocess.run(
        [
            node_client.node(), "--input-type=module", "-e", TRAJECTORY,
            json.dumps({"state": state, "actions": actions}),
        ],
        cwd=node_client.FOLDER, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert np.allclose(json.loads(done.stdout), expected, rtol=0, atol=1e-6)
    assert len(first) == 4


async def test_episodes_are_played_with_their_rewards(server: ScriptedServer) -> None:
    policy = server.policy
    result = await asyncio.to_thread(node_client.play, server.address, 3, learn=True)
    assert result["episodes"] == 3
    assert 8 <= result["mean_return"] <= 11
    assert len(policy.heard["Act"]) == 3 * result["mean_return"]
    assert [act.HasField("reward") for act in policy.heard["Act"][:2]] == [False, True]
    assert not policy.heard["StartEpisode"][0].not_learned
    assert policy.heard["EndEpisode"][0].reward == 1.0


async def test_lost_replies_and_overloads_cost_nothing(server: ScriptedServer) -> None:
    policy = server.policy
    policy.lost["Act"] = [server.closes]
    policy.script["EndEpisode"] = [refuses(Reason.OVERLOADED, 50), refuses(Reason.EPISODE_UNKNOWN)]
    result = await asyncio.to_thread(node_client.play, server.address, 1)
    assert result["episodes"] == 1
    assert policy.heard["Act"][0] == policy.heard["Act"][1]
    assert policy.heard["EndEpisode"][0] == policy.heard["EndEpisode"][1]
    assert len(policy.heard["StartEpisode"]) == 2
    assert policy.heard["StartEpisode"][0].not_learned
