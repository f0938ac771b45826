"""The lines of docs/onnx.md act as the policy does, in onnxruntime for Python and for Node.js."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.policy.policy import Policy
from tests.support.serving import node_client
from tests.support.serving.exported_policies import CASES, deterministic, masks, observations, trained

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = (ROOT / "docs" / "onnx.md").read_text()
EXAMPLE: Final = ROOT / "examples" / "onnx"
SHOWN: Final = (
    "choices",
    "a tuple of a dictionary",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "a vector and a choice",
            "values of choices",
            "bits",
            "clipped, with a bound that is not finite",
            "squashed, with a deviation for each state",
        )
    ),
)
PYTHON: Final = """
given = np.load("given.npz")
np.savez("acted.npz", **act({path: given[path] for path in given.files}))
"""
NODE: Final = """
const given = JSON.parse(await readFile("given.json", "utf8"));
const values = ([type, values, shape]) =>
  new ort.Tensor(type, type === "int64" ? values.map(BigInt) : values, shape);
const tensors = Object.entries(given).map(([path, one]) => [path, values(one)]);
const acted = Object.entries(await act(Object.fromEntries(tensors)));
const told = acted.map(([path, { data, dims }]) => [path, [Array.from(data, Number), dims]]);
console.log(JSON.stringify(Object.fromEntries(told)));
"""

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")


def first_block(language: str) -> str:
    """The first block of the page in a language: what defines `act`."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if line]
    assert len(lines) <= 10
    return found[1]


def in_python(folder: Path, rows: dict[str, Any]) -> dict[str, Any]:
    np.savez(folder / "given.npz", **rows)
    (folder / "act.py").write_text(first_block("python") + PYTHON)
    done = subprocess.run(
        [sys.executable, "act.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    acted = np.load(folder / "acted.npz")  # noqa: TID251 - numbers alone: it would refuse objects
    return {path: acted[path] for path in acted.files}


def in_node(folder: Path, rows: dict[str, Any]) -> dict[str, Any]:
    node_client.install(EXAMPLE)
    given = {path: [array.dtype.name, array.flatten().tolist(), array.shape] for path, array in rows.items()}
    (folder / "given.json").write_text(json.dumps(given))
    (folder / "act.mjs").write_text(first_block("js") + NODE)
    modules = folder / "node_modules"
    if not modules.exists():
        modules.symlink_to(EXAMPLE / "node_modules")
    done = subprocess.run(
        [node_client.node(), "act.mjs"], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {path: np.array(values).reshape(shape) for path, (values, shape) in told.items()}


def write(policy: Policy, folder: Path, *, masked: tuple[str, ...] = ()) -> None:
    from penstock.policy.onnx_export import to_onnx

    (folder / "policy.onnx").write_bytes(to_onnx(policy, {}, masks=masked))


@pytest.mark.promise("exported-model-acts-policy")
@pytest.mark.parametrize("name", SHOWN)
def test_the_code_on_the_page_acts_as_the_policy_does(name: str, tmp_path: Path) -> None:
    space, action, section = CASES[name]
    policy = trained(space, action, section)
    allowed = masks(action, 6) if name == "choices" else {}
    write(policy, tmp_path, masked=tuple(allowed))
    rows = {**observations(space, 6), **allowed}
    expected = deterministic(policy, rows)
    for acted in (in_python(tmp_path, rows), in_node(tmp_path, rows)):
        assert acted.keys() == expected.keys()
        for path, wanted in expected.items():
            assert acted[path].shape == wanted.shape
            np.testing.assert_allclose(acted[path], wanted, rtol=0, atol=5e-5)
