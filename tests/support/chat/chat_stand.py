"""The page of a chat over real servers of text in this process, and the reward model of a loop beside it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.gateway.application import site_listener
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.upstream import RunAddresses, RunSettings, Upstream
from penstock.registry.registry import Registry
from penstock.rpc.auth import Credentials
from penstock.workloads.chat import people
from penstock.workloads.chat.http.chat_routes import site
from penstock.workloads.chat.loop_state import (
    folder_of,
    member_heads,
    member_weights,
    with_members,
)
from penstock.workloads.chat.people import population
from penstock.workloads.chat.step_process import ServedJudge, judge_address, keep_judge
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
from tests.support.language.chat_words import chat_tokenizer
from tests.support.language.text_address import served_text
from tests.support.language.text_stand import WORDS
from tests.support.run.broker_process import eventually

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
