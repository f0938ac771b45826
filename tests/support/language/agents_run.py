"""A run that learns from agents alone, and the gateway before its server, as processes of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.launch.run.supervisor import penstock
from tests.support.language.language_learner import words_file
from tests.support.run.harness import Training, eventually, wait_until_gone

START_S: Final = 120.0


@contextmanager
def agents_run(
    folder: Path,
    socket: Path,
    base: Path,
    *,
    seed: int = 0,
    batch_steps: int = 256,
    engine: str = "transformers",
) -> Iterator[Training]:
    """Train `base` with a server at `unix:SOCKET` until the block ends; nothing of it is left afterwards."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "more")))
    kwargs = {"response_tokens": 4, "engine": engine, "held_out": 0.5}
    algorithm = {
        "name": "token_ppo",
        "batch_steps": batch_steps,
        "epochs": 2,
        "minibatches": 1,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.05,
        "gae_lambda": 1.0,
        "turn_discount": 0.98,
        "learning_rate": 3e-3,
        "critic_learning_rate": 3e-3,
    }
    file = words_file(
        folder,
        base,
        prompts,
        "penstock.workloads.rlhf.sentiment:true_rewards",
        run="agents",
        seed=seed,
        environment={"id": "agents", "count": 1, "kwargs": kwargs},
        policy={"kwargs": {"rank": 8, "alpha": 16.0}},
        actor={"count": 0, "unroll_length": 40},
        algorithm=algorithm,
        serving={"listen": f"unix:{socket}"},
        learner={"total_steps": 100_000_000, "checkpoint_interval_s": 5},
        evaluation={"episodes": 4, "interval_steps": 100_000_000},
    )
    training = Training(folder / "run", file, "--json")
    try:
        training.until(lambda: (training.run_dir / "endpoints.json").exists() and socket.exists())
        yield training
    finally:
        training.process.kill()
        training.process.communicate()
        if (training.run_dir / "endpoints.json").exists():
            wait_until_gone(training)


@contextmanager
def gateway(socket: Path, folder: Path) -> Iterator[str]:
    """The agents' API in a process of its own; its `base_url`."""
    told = folder / "gateway.json"
    command = penstock(
        *("gateway", "text", "--server", f"unix:{socket}", "--listen", "127.0.0.1:0"),
        *("--endpoints", str(told)),
    )
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(
            lambda: told.exists() and bool(json.loads(told.read_text()).get("address")),
            "the address of the gateway",
            START_S,
        )
        yield f"http://{json.loads(told.read_text())['address']}/v1"
    finally:
        process.terminate()
        code = process.wait()
    assert code == 0


@contextmanager
def agent(task: str, base_url: str, conversations: int, *, seed: int = 0) -> Iterator[Iterator[float]]:
    """An agent's script in a process of its own; what each of its conversations earned, as it comes."""
    words = ("tests.support.language.agents", task, base_url, str(conversations), str(seed))
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield map(float, process.stdout)
    finally:
        process.kill()
        process.communicate()
