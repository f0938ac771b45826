import json
import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from penstock.launch.run.supervisor import penstock
from penstock.workloads.chat.loop_state import LoopState, Step, folder_of, read_state
from tests.support.prompts.prompts_gateway import PATIENCE_S, PromptsGateway

TALKS = [
    ("hello", "Hello there, nice to meet you."),
    ("how are you", "I am well. And you?"),
    ("what do you eat", "I eat nothing but words."),
    ("tell me a joke", "I know none. Ask me later."),
]


class ChatGateway(PromptsGateway):
    """A gateway on a free port. options: as of its command, behind those of the small model."""

    site = "chat"

    def __init__(
        self,
        folder: Path,
        *options: str,
        task: str = "",
        talks: Sequence[tuple[str, str]] = TALKS * 6,
        training: str = "epochs = 30, batch = 8, learning_rate = 1e-2, hidden = 32, layers = 1, pieces = 320",
    ) -> None:
        """task: further keys of `environment.kwargs`, as TOML. talks: what the model learns, and how."""
        file = folder / "talks.jsonl"
        rows = [json.dumps({"prompt": asked, "response": said}) for asked, said in talks]
        file.write_text("".join(f"{row}\n" for row in rows))
        base = f"{{{training}, max_tokens = 128, held_out = 0.0}}"
        kwargs = (
            f'task = "chat", conversations = "{file}", base_training = {base}, response_tokens = 24, '
            f'reward = "{REWARD}", held_out = 0.5'
        )
        small = (
            f"--train=environment.kwargs={{{kwargs}{task}}}",
            "--train=actor.unroll_length=127",
            "--train=evaluation.episodes=2",
        )
        super().__init__(folder, *small, *options)
        self.me = secrets.token_hex(16)

    def begin(self) -> "Talk":
        return Talk(self, str(self.post("/api/chat/begin", me=self.me)["conversation"]))


REWARD = "tests.support.chat.chat_gateway:is_short"


def is_short(prompts: list[Any], responses: list[str]) -> list[float]:
    """A reward that the evaluation of such a run measures."""
    del prompts
    return [1 / (1 + len(one)) for one in responses]


class Talk:
    """A conversation over HTTP."""

    def __init__(self, gateway: ChatGateway, conversation: str) -> None:
        self._gateway, self.id = gateway, conversation

    @property
    def named(self) -> dict[str, Any]:
        return {"me": self._gateway.me, "conversation": self.id}

    def say(self, text: str | None) -> tuple[list[str], str, dict[str, Any]]:
        """The parts that came, the kind of the last event, and what it holds."""
        reply = self._gateway.session.post(
            f"{self._gateway.url}/api/chat/say",
            json={**self.named, **({} if text is None else {"text": text})},
            timeout=PATIENCE_S,
        )
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [read_event(one) for one in reply.text.split("\n\n") if one]
        *parts, (kind, data) = events
        return [str(one["text"]) for _, one in parts], kind, data

    def tell(self, what: str, turn: int, **said: Any) -> dict[str, Any]:
        body = {"id": secrets.token_hex(16), **said}
        return dict(self._gateway.post(f"/api/chat/{what}", turn=turn, **self.named, **body))

    def end(self) -> None:
        self._gateway.post("/api/chat/end", **self.named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()


def read_event(text: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of an event, and what it holds."""
    kind, data = text.split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


PROCESS_PATIENCE_S = 120.0


class LoopProcess:
    """A loop of a run's folder. Leaving ends it."""

    def __init__(self, run: Path, log: Path, *options: str) -> None:
        self.run, self.log, self._options = run, log, options
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as out:
            return subprocess.Popen(
                penstock("chat", "loop", "run", str(self.run), *self._options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def start(self) -> None:
        """Begin it once more, after a kill."""
        self.process = self._started()

    def state(self) -> LoopState:
        return read_state(folder_of(self.run))

    def await_step(self, *steps: Step) -> LoopState:
        deadline = time.monotonic() + PROCESS_PATIENCE_S
        while (state := self.state()).step not in steps or not state.order:
            assert self.process.poll() is None, self.said()
            assert not state.failure, self.said()
            assert time.monotonic() < deadline, (state, self.said())
            time.sleep(0.05)
        return state

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PROCESS_PATIENCE_S)

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(PROCESS_PATIENCE_S)

    def said(self) -> str:
        logs = [self.log, *folder_of(self.run).glob("rounds/*/steps.log")]
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PROCESS_PATIENCE_S)


def told(run: Path) -> Any:
    done = subprocess.run(
        penstock("chat", "loop", "status", str(run), "--json"), capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)
