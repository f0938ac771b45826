"""Nothing that comes over the wire or from disk can run code.

By the source, and by a lint rule that holds it.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("actor", "benchmarks", "broker", "learner", "penstock")
MODULES: Final = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
)
CALLS: Final = frozenset(
    {
        *("eval", "exec", "compile"),
        *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
        *("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
        *("os.system", "os.popen", "subprocess.getoutput", "multiprocessing.connection.Listener"),
    }
)
KEYWORDS: Final = frozenset({("shell", True), ("allow_pickle", True), ("weights_only", False)})


def unsafe(source: str) -> list[str]:
    """What of a source could run code that comes as data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in CALLS else []
            words = [(word.arg, getattr(word.value, "value", None)) for word in node.keywords]
            found += [f"{name}({key}={value})" for key, value in words if (key, value) in KEYWORDS]
    return found


def test_no_source_runs_code_that_comes_as_data() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): unsafe(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


SAMPLES: Final = {
    "pickle": "import pickle\n",
    "pickle, from": "from pickle import loads\n",
    "cloudpickle": "import cloudpickle\n",
    "dill": "import dill\n",
    "marshal": "import marshal\n",
    "shelve": "import shelve\n",
    "joblib": "import joblib\n",
    "torch.load": 'import torch\n\ntorch.load("x")\n',
    "torch.save": 'import torch\n\ntorch.save({}, "x")\n',
    "numpy.load": 'import numpy as np\n\nnp.load("x")\n',
    "yaml.load": 'import yaml\n\nyaml.load("x")\n',
    "eval": 'eval("1")\n',
    "exec": 'exec("1")\n',
    "a shell": 'import subprocess\n\nsubprocess.run("ls", shell=True, check=True)\n',
    "os.system": 'import os\n\nos.system("ls")\n',
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_the_test_finds_each(sample: str) -> None:
    assert unsafe(sample)


def test_the_lint_rule_finds_each(tmp_path: Path) -> None:
    for index, sample in enumerate(SAMPLES.values()):
        (tmp_path / f"sample_{index}.py").write_text(sample)
    ruff = Path(sys.executable).with_name("ruff")
    select = ("--select", "TID251,S102,S301,S302,S307,S506,S602,S605", "--output-format", "concise")
    command = [
        str(ruff),
        "check",
        "--no-cache",
        "--config",
        str(ROOT / "pyproject.toml"),
        *select,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    missed = [what for index, what in enumerate(SAMPLES) if f"sample_{index}.py" not in done.stdout]
    assert (done.returncode, missed) == (1, []), done.stdout + done.stderr


def test_no_lint_comment_lets_one_through() -> None:
    rules = ("TID251", "S102", "S301", "S302", "S307", "S506", "S602", "S605", "S614")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if "noqa" in line and any(rule in line for rule in rules)
    ]
    assert found == []
