"""Threads that compute keep the limit of their process, and no other thread computes."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from penstock.client import PolicyClient
from penstock.config.settings import PolicySection
from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from tests.support.run.broker_process import eventually
from tests.support.run.serving_run import ServedRun

ROOT: Final = Path(__file__).resolve().parents[2]
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

def tasks():
    return len(os.listdir("/proc/self/task"))

def product():
    before = tasks()
    torch.mm(MATRIX, MATRIX, out=torch.empty(700, 700))
    return tasks() - before, torch.get_num_threads()

MATRIX = torch.randn(700, 700)

async def main():
    batcher = Batcher(max_rows=1, max_wait_s=0.0, max_delay_s=1.0)
    scoring = reward_service.Batcher(len, max_rows=1)
    pools = {
        "inference": batcher._threads,
        "shadow": Shadow(batcher, None)._thread,
        "scoring": scoring._thread,
        "encoding": reward_service.RewardService(None, scoring)._encoding,
        "rewards": RewardScorer(None, None, reads_tokens=False, standardise=False)._caller,
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


def test_pools_that_compute_keep_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", POOLS, str(LIMIT)],
        env={**os.environ, "OMP_NUM_THREADS": str(DEFAULT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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


def test_numpy_computes_on_one_thread_whatever_the_environment_says() -> None:
    code = (
        "import os, penstock.launch.cli.app\nimport numpy as np\n"
        "np.ones((512, 512)) @ np.ones((512, 512))\nprint(len(os.listdir('/proc/self/task')))"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "6"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def makers() -> Iterator[tuple[str, str]]:
    """Files that make threads which keep no limit, and what they make them with.

    Rooms that must not load torch, by the contracts of pyproject.toml, are left out.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    without_torch = tuple(
        re.sub(r"^penstock/(actor|broker|learner)\b", r"\1", room.replace(".", "/"))
        for one in contracts
        if "torch" in one.get("forbidden_modules", ())
        for room in one["source_modules"]
    )
    for package in ("actor", "broker", "learner", "penstock"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not within(name, without_torch):
                yield from ((name, made) for made in made_in(ast.parse(path.read_text())))


def made_in(tree: ast.Module) -> Iterator[str]:
    """The calls and the base classes that make threads."""
    for node in ast.walk(tree):
        made = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
        yield from (name for name in map(ast.unparse, made) if MAKES_THREADS.fullmatch(name))


def within(name: str, rooms: Iterable[str]) -> bool:
    """A file is one of these, or in one of these folders."""
    return any(
        name.removesuffix(".py") == room.removesuffix(".py") or name.startswith(f"{room}/") for room in rooms
    )


def test_no_other_thread_computes() -> None:
    found = list(makers())
    assert [one for one in found if not within(one[0], DO_NOT_COMPUTE)] == []
    assert [room for room in DO_NOT_COMPUTE if not any(within(name, [room]) for name, _ in found)] == []


def test_a_thread_without_the_limit_is_found() -> None:
    text = "class A(Thread): ...\nthreading.Thread(target=f)\nfutures.ThreadPoolExecutor(1)\nasyncio.run(f())"
    assert len(list(made_in(ast.parse(text)))) == 4
