"""A round of the loop: from people's thumbs to a canary of the server that answers them, and its end."""

from pathlib import Path

import numpy as np
import pytest

from penstock.registry.records import Status
from penstock.registry.registry import Registry
from penstock.workloads.chat.loop_state import Outcome, Step, folder_of, round_folder
from penstock.workloads.chat.people import population
from penstock.workloads.chat.step_process import has_checkpoint
from tests.support.chat.chat_gateway import ChatGateway, LoopProcess, told
from tests.support.chat.opinions import people_talk, talks
from tests.support.run.harness import eventually

pytestmark = pytest.mark.timeout(900)

LABELS = 24
TRAINING = "epochs = 6, batch = 16, learning_rate = 1e-2, hidden = 32, layers = 1, pieces = 320"
QUICK = (
    f"--labels={LABELS}",
    "--least-auc=0",
    "--any-version",
    "--reward=epochs=1",
    "--train=learner.total_steps=5000",
    "--train=learner.checkpoint_interval_s=0",
    "--train=evaluation.episodes=2",
)


@pytest.mark.promise("loop-chat-makes-round")
@pytest.mark.parametrize(
    "killed",
    [set(), pytest.param({Step.WAITING, Step.REWARD, Step.TRAINING, Step.TRIAL}, marks=pytest.mark.slow)],
    ids=["nowhere", "everywhere"],
)
def test_a_loop_makes_one_round_from_new_ratings(killed: set[Step], tmp_path: Path) -> None:
    rng, people = np.random.default_rng(1), population(40, seed=1)
    options = ("--train=learner.keep_every_updates=1000", "--train=canary.settle_s=1.0")
    with ChatGateway(tmp_path, *options, talks=talks(1, 240), training=TRAINING) as gateway:
        run, log = gateway.state / "run", tmp_path / "loop.log"
        assert {one.arm for one in people_talk(gateway, people, rng, LABELS - 1)} == {"latest"}
        with LoopProcess(run, log, *QUICK) as loop:
            loop.await_step(Step.WAITING)
            if Step.WAITING in killed:
                loop.kill()
                loop.start()
                loop.await_step(Step.WAITING)
            gateway.post("/api/chat/weigh", weights={"thumb": 3}, reason="thumbs are what people give")
            list(people_talk(gateway, people, rng, 1))
            loop.await_step(Step.REWARD)
            if Step.REWARD in killed:
                loop.kill()
                loop.start()
            at = loop.await_step(Step.TRAINING)
            training = round_folder(folder_of(run), 1) / "run"
            assert (at.number, at.labels, at.through) == (1, LABELS, LABELS)
            if Step.TRAINING in killed:
                eventually(lambda: has_checkpoint(training), "the training", 120)
                loop.kill()
            list(people_talk(gateway, people, rng, LABELS))  # of the next round
            if Step.TRAINING in killed:
                loop.start()
            at = loop.await_step(Step.TRIAL)
            canary = at.version
            assert canary is not None
            _await_canary(gateway, canary)
            if Step.TRIAL in killed:
                loop.kill()
            heard = list(people_talk(gateway, people, rng, 12))
            assert {one.version for one in heard} == {1, canary}
            assert {one.arm for one in heard} == {"active", "canary"}
            if Step.TRIAL in killed:
                loop.start()
            found = told(run)
            assert (found["loop"]["step"], found["canaries"]["tried"]) == ("trial", 1)
            thumb = next(one for one in found["loop"]["judge"]["heads"] if one["head"] == "thumb")
            assert (found["loop"]["judge"]["round"], thumb["weight"]) == (1, 3.0)
            assert thumb["ratings"] > 0
            assert 0 <= thumb["calibrationError"] <= 1
            assert found["canaries"]["trial"]["version"] == canary
            gateway.post("/api/chat/pause", reason="one round is enough")
            gateway.post("/api/chat/rollback", version=canary, reason="I do not like it")
            gateway.post("/api/chat/resume")
            eventually(lambda: bool(loop.state().past), "the end of the round", 60)
            (past,) = loop.state().past
            assert (past.outcome, past.why, past.version) == (Outcome.WITHDRAWN, "I do not like it", canary)
            after = loop.await_step(Step.RATINGS, Step.REWARD, Step.TRAINING)
            assert (after.number, after.taken) == (2, LABELS)
            assert after.labels == LABELS + len(heard)
        _one_training(run, canary, resumed=Step.TRAINING in killed)
        eventually(
            lambda: {one.arm for one in people_talk(gateway, people, rng, 4)} == {"active"},
            "a server that has heard of it",
            60,
        )
    assert gateway.summary()["ledger"]["balanced"]


def _await_canary(gateway: ChatGateway, canary: int) -> None:
    """The server answers with it."""
    eventually(
        lambda: canary in [one["version"] for one in gateway.get("/api/chat/overview")["versions"]],
        "the canary at the server",
        60,
    )


def _one_training(run: Path, canary: int, *, resumed: bool) -> None:
    """What the first round has left: one version, its weights, and no text of anybody."""
    folder = round_folder(folder_of(run), 1)
    with Registry.read(f"sqlite:///{run}/registry.sqlite") as registry:
        own = [one for one in registry.list("default") if "-round-1-" in one.run]
        active = registry.active("default")
    assert [one.version for one in own if one.status is Status.ROLLED_BACK] == [canary]
    assert active is not None
    assert active.version == 1
    assert (folder / "run" / "policies" / f"{canary}.safetensors").exists()
    assert not (folder / "believed.jsonl").exists()
    words = [line for line in (folder / "steps.log").read_text().splitlines() if line.startswith("$ ")]
    newest = [line.split()[2:4] for line in words if "train" in line][-1]
    assert newest == ["train", "run" if resumed else "round.toml"]
    assert sum("--resume" not in line and " train round.toml" in line for line in words) == 1
