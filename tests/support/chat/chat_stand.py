import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.config.sections import CanarySection
from penstock.config.settings import Settings, dump, load
from penstock.gateway.application import site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.upstream import RunAddresses, RunSettings, Upstream
from penstock.policy.weights import sha256
from penstock.registry.canary import ClientReturn, Trial
from penstock.registry.ratings import Rating
from penstock.registry.records import NewVersion, Origin, PolicyVersion, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import write_kept
from penstock.rpc.auth import Credentials
from penstock.workloads.chat import loop_state, people
from penstock.workloads.chat.http.chat_routes import site
from penstock.workloads.chat.learning_loop import WAITS_S, LearningLoop, run_name
from penstock.workloads.chat.loop_state import (
    LoopOrder,
    LoopState,
    Step,
    folder_of,
    member_heads,
    member_weights,
    with_members,
)
from penstock.workloads.chat.people import population
from penstock.workloads.chat.step_process import ServedJudge, ServedRun, judge_address, keep_judge, read_run
from penstock.workloads.language.feedback import Source, parse_scale, write_rows
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.heads import parse_heads, parse_weights
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.reward.training import Order, train
from penstock.workloads.language.settings import RewardTraining
from tests.support.chat.opinions import feedback
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.language.text_stand import WORDS, served_text
from tests.support.language.tiny_models import chat_tokenizer
from tests.support.run.harness import eventually

PROJECT = "alpha"


@contextmanager
def upstream_of(base: Path, folder: Path, socket: Path, **serving: Any) -> Iterator[Upstream]:
    """A run whose server of text learns nothing, as a site is told of it."""
    with served_text(base, socket, learns=False, **serving), upstream_at(folder, socket) as found:
        yield found


@contextmanager
def upstream_at(folder: Path, socket: Path) -> Iterator[Upstream]:
    """A run whose server of text is at this socket, as a site is told of it."""
    url = f"sqlite:///{folder / 'registry.sqlite'}"
    with Registry.open(url, migrate=True):
        yield Upstream(
            addresses=lambda: RunAddresses(server=f"unix:{socket}"),
            credentials=Credentials(),
            settings=lambda: RunSettings(task={}, registry=url, folder=folder),
            state=folder / "state",
        )


def chat_app(run: Upstream, agents: Mapping[str, Upstream], gateway: SmallGateway | None) -> FastAPI:
    """The application. agents: further runs. gateway: whose accounts are asked for; None: nobody is."""
    accounts = None if gateway is None else gateway.accounts
    return make_app(site_listener(site(), replace(run, agents=dict(agents)), Doors(), accounts, PROJECT))


@contextmanager
def client_at(folder: Path, socket: Path) -> Iterator[TestClient]:
    """Who calls a gateway over the server of text at this socket, which asks nobody who they are."""
    with (
        upstream_at(folder, socket) as run,
        TestClient(
            chat_app(run, {}, None), base_url="http://127.0.0.1", raise_server_exceptions=False
        ) as client,
    ):
        yield client


@contextmanager
def page_of(app: FastAPI) -> Iterator[str]:
    """Where it answers, on a port of its own."""
    server = HttpServer(app, "127.0.0.1:0")
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


@contextmanager
def served_judge(folder: Path) -> Iterator[str]:
    """The address of a reward model with an ensemble, in a process of its own."""
    tokenizer = chat_tokenizer(*people.WORDS, *WORDS)
    tiny_models.save(tiny_models.build_model(tokenizer, seed=0), tokenizer, folder / "base")
    said = feedback(population(9, seed=0), np.random.default_rng(0), rated=80, compared=0)
    write_rows(folder / "said.jsonl", with_members(said))
    heads = ["thumb=thumbs", "relevance=stars"]
    members = member_heads(heads)
    train(
        Order(
            source=Source(place=str(folder / "said.jsonl"), scale=parse_scale("none")),
            heads=parse_heads([*heads, *members]),
            base=str(folder / "base"),
            out=folder / "model",
            settings=RewardTraining(epochs=2, batch=16, learning_rate=3e-3, rank=4),
            weights=parse_weights(member_weights(members)),
        )
    )
    keep_judge(folder, folder / "model")
    with ServedJudge(folder) as served:
        served.look()
        eventually(lambda: bool(judge_address(folder)), "the reward model", 60)
        client = RewardClient(judge_address(folder))
        assert client.judge(Sample(prompt=(Message("user", "sum"),), response="done"))
        client.close()
        yield judge_address(folder)


def beside(run: Path, judge: str) -> None:
    """The reward model at this address is that of the loop of a run."""
    folder_of(run).mkdir()
    endpoint = {"role": "reward", "address": judge, "metrics_port": 0, "pid": os.getpid()}
    (folder_of(run) / "judge.json").write_text(json.dumps(endpoint))


POLICY = "default"


def settings_of(model: str, **sections: Any) -> Settings:
    kwargs = {"model": model, "task": "chat", "response_tokens": 8}
    usual: dict[str, Any] = {
        "workload": "rlhf",
        "run": "talk",
        "environment": {"id": "chat", "count": 1, "kwargs": kwargs},
        "policy": {"kwargs": {"model": model, "rank": 4}},
        "algorithm": {"name": "token_ppo", "batch_steps": 64},
        "actor": {"unroll_length": 63},
    }
    return load([usual, sections])


@dataclass(slots=True)
class LoopStand:
    """The run. active, made: versions, of which `made` is that of round 1."""

    run: ServedRun
    registry: Registry
    active: PolicyVersion
    made: PolicyVersion

    @property
    def folder(self) -> Path:
        return loop_state.folder_of(self.run.folder)

    def at(self, **changes: Any) -> None:
        loop_state.write_state(self.folder, LoopState(**{"number": 1, "labels": 7, "through": 3, **changes}))

    def on_trial(self, share: float = 0.5) -> None:
        self.at(step=Step.TRIAL, version=self.made.version)
        self.registry.promote(
            POLICY, self.made.version, "tried", by="test", to=Status.CANARY, canary_share=share
        )

    def answering(self) -> PolicyVersion:
        """The version that is active now."""
        active = self.registry.active(POLICY)
        assert active is not None
        return active

    def see(self, canary: float, active: float, people: int) -> None:
        """So many people of each arm have earned that much."""
        trial = Trial.of(self.registry.arms(POLICY))
        assert trial is not None
        seen = [
            ClientReturn(
                client=f"{arm}-{number}", level=0, canary=arm, part=0.5, value=canary if arm else active
            )
            for number in range(people)
            for arm in (True, False)
        ]
        self.registry.judge(POLICY, trial, CanarySection(), seen)

    def rate(self, count: int, *, rater: str = "", begin: int = 0) -> None:
        """So many thumbs, each of a person of its own unless one is named."""
        said = []
        for number in range(begin, begin + count):
            prompt = [{"role": "user", "content": f"question {number}"}]
            by = rater or f"person-{number}"
            said.append(Rating(prompt=prompt, response="answer", score=1.0, key="thumb", rater=by))
        self.registry.add_ratings(POLICY, said)

    def loop(
        self,
        order: LoopOrder,
        draining: threading.Event,
        *,
        once: bool = True,
        waits_s: Sequence[float] = WAITS_S,
    ) -> LearningLoop:
        return LearningLoop(self.run, order, draining, once=once, waits_s=waits_s)

    @contextmanager
    def going(self, order: LoopOrder, waits_s: Sequence[float] = WAITS_S) -> Iterator[None]:
        """The loop goes on in a thread while the block runs."""
        over = threading.Event()
        loop = self.loop(order, over, once=False, waits_s=waits_s)
        thread = threading.Thread(target=loop.go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def state(self) -> LoopState:
        return loop_state.read_state(self.folder)


@contextmanager
def loop_stand(folder: Path, model: str = "base", **sections: Any) -> Iterator[LoopStand]:
    """A run below a folder; version 1 is active, and one that round 1 registered is a candidate."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump(settings_of(model, **sections)))
    run = read_run(run_dir)
    with Registry.open(run.url, migrate=True) as registry:
        active = _registered(registry, run_dir, 1, run.settings.run)
        registry.promote(POLICY, 1, "first", by="test")
        place = loop_state.round_folder(loop_state.folder_of(run_dir), 1) / "run"
        made = _registered(registry, place, 100, run_name(run, 1))
        yield LoopStand(run, registry, active, made)


def _registered(registry: Registry, place: Path, version: int, run: str) -> PolicyVersion:
    blob = f"weights of {version}".encode()
    write_kept(place, version, blob)
    new = NewVersion(
        policy=POLICY,
        version=version,
        run=run,
        update=version,
        sha256=sha256(blob),
        size_bytes=len(blob),
        origin=Origin.FINAL,
        place=str(place),
    )
    return registry.register(new, by="test")


def soon(found: Callable[[], bool], within_s: float = 20.0) -> bool:
    pause, tries = threading.Event(), int(within_s / 0.05)
    return any(found() or pause.wait(0.05) for _ in range(tries))
