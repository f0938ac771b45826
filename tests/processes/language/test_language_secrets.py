"""A run of language models whose rewards come from an endpoint that asks for a secret: it stands nowhere."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.abuse.identities import leaves_no_secret, locked_redis

CONFIG = """
workload = "rlhf"
[environment]
id = "words"
count = 4
[environment.kwargs]
model = "{base}"
prompts = "{prompts}"
reward = "{reward}"
response_tokens = 4
[policy.kwargs]
rank = 4
[actor]
unroll_length = 12
[algorithm]
batch_steps = 48
[learner]
total_steps = 96
[evaluation]
episodes = 2
"""


@contextmanager
def endpoint(told: list[str | None]) -> Iterator[str]:
    """Rewards over HTTP; `told`: what each call brought as its authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.headers.get("Authorization"))
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps({"rewards": [0.5] * len(asked["samples"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            """Nothing: its lines are not those of the run."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


@pytest.mark.slow
def test_a_run_of_language_models_leaves_no_secret_behind(
    base: Path, prompts: Path, short_folder: Path, tmp_path: Path
) -> None:
    told: list[str | None] = []
    file = tmp_path / "words.toml"
    with endpoint(told) as reward, locked_redis(short_folder) as locked:
        file.write_text(CONFIG.format(base=base, prompts=prompts, reward=reward))
        leaves_no_secret(locked, tmp_path, str(file), (), runs="words")
    assert told
    assert set(told) == {"Bearer planted-0d9f-one"}
