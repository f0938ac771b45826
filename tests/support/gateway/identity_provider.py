"""A provider of identities on a free port of loopback, whose tokens a test may replace by others."""

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import jwt
import oidc_provider_mock
import werkzeug.serving
from cryptography.hazmat.primitives.asymmetric import rsa

PEOPLE: dict[str, dict[str, Any]] = {
    "alice": {"email": "alice@example.com", "email_verified": True, "preferred_username": "alice"},
    "mallory": {"email": "alice@example.com", "email_verified": False, "preferred_username": "alice"},
    "bob": {"email": "bob@elsewhere.example", "email_verified": True, "preferred_username": "Bob!"},
}
Forge = Callable[[dict[str, Any]], tuple[dict[str, Any], str]]
"""Claims of a token → the claims of one in its place, and the algorithm that signs it."""


@dataclass
class IdentityProvider:
    """A provider that goes on. exchanged: the forms that came to its token endpoint. forge: of tokens."""

    issuer: str = ""
    exchanged: list[dict[str, str]] = field(default_factory=list)
    forge: Forge | None = None
    fails: bool = False
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048), repr=False)

    def wrapped(self, app: Any) -> Any:
        """The provider's application with the recorder, and with the forger where there is one, around it."""

        def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if self.fails:
                start("500 No", [])
                return [b"no"]
            if path == "/oauth2/token":
                body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                environ["wsgi.input"] = io.BytesIO(body)
                self.exchanged.append({name: one[0] for name, one in parse_qs(body.decode()).items()})
            if self.forge is None or path not in {"/oauth2/token", "/jwks"}:
                result: Iterable[bytes] = app(environ, start)
                return result
            content = self._keys() if path == "/jwks" else self._forged(app, environ)
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(content).encode()]

        return answer

    def _keys(self) -> Any:
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**public, "kid": "forged", "use": "sig"}]}

    def _forged(self, app: Any, environ: dict[str, Any]) -> Any:
        found = json.loads(b"".join(app(environ, lambda *_: None)))
        claims = jwt.decode(found["id_token"], options={"verify_signature": False})
        assert self.forge is not None
        claims, algorithm = self.forge(claims)
        key: Any = {"none": None, "HS256": "a secret that both know, long enough"}.get(algorithm, self.key)
        found["id_token"] = jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "forged"})
        return found


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    people = [oidc_provider_mock.User(sub=name, claims=claims) for name, claims in PEOPLE.items()]
    made = IdentityProvider()
    app = made.wrapped(oidc_provider_mock.app(user_claims=people))
    server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True)
    made.issuer = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
