"""Who calls, and may they: every kind of caller at every RPC, sessions of others, floods of one caller."""

import dataclasses
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc import StatusCode

from penstock.actor.link.broker_client import BrokerClient, SessionReply
from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from penstock.rpc.auth import ACCESS, AcceptedTokens, Credentials, digest
from penstock.rpc.channel import open_channel
from penstock.rpc.identity import Party, Unidentified
from penstock.v1 import (
    control_pb2,
    control_pb2_grpc,
    experience_pb2,
    experience_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from tests.support.abuse.identities import NAMES, OTHER_RUN, PATIENCE_S, Secure, outcome, secured
from tests.support.run import harness
from tests.support.run.harness import eventually, launch
from tests.support.run.simulated_actor import SimulatedActor, code_of, refusal_of
from tests.support.run.small_run import RUN, fragment

PARTIES: Final = {
    **{party.value: party for party in Party},
    **{f"actor-{name}": Party.ACTOR for name in NAMES},
}
ELSEWHERE: Final = ("/penstock.v1.PolicyService/",)
SERVED: Final = [path for path in ACCESS if not path.startswith(ELSEWHERE) and "Health" not in path]
HEALTH: Final = "/grpc.health.v1.Health/Check"
NOTHING_NEW: Final[dict[str, Any]] = {
    "known_version": 2**53,
    "known_begin_through": 2**53,
    "known_revision": 2**53,
}
STATUS: Final = "/penstock.v1.ControlService/Status"


def test_every_rpc_is_in_the_table() -> None:
    described = {
        f"/{service.full_name}/{method.name}"
        for file in (experience_pb2, weights_pb2, control_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    ours = {path for path in ACCESS if path.startswith("/penstock.v1.")}
    assert {path for path in ours if not path.startswith(ELSEWHERE)} == described


@pytest.fixture
def certified(short_folder: Path) -> Iterator[Secure]:
    with secured(short_folder) as secure:
        yield secure


@pytest.fixture
def tokened(short_folder: Path) -> Iterator[Secure]:
    with secured(short_folder, tokens=True) as secure:
        yield secure


def expect(caller: str, path: str, rest: StatusCode) -> set[StatusCode]:
    """Statuses that end a call of this caller; `rest`: of callers that are not known at all."""
    if caller == "other-run":
        return {StatusCode.PERMISSION_DENIED}
    if caller not in PARTIES:
        return {rest}
    if PARTIES[caller] not in ACCESS[path]:
        return {StatusCode.PERMISSION_DENIED}
    return set(StatusCode) - {
        *(StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED),
        *(StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN),
    }


def matrix(secure: Secure, callers: dict[str, Credentials], rest: dict[str, StatusCode]) -> list[str]:
    """Every caller at every RPC with an empty message; what did not end as the table says."""
    wrong = []
    for caller, credentials in callers.items():
        with open_channel(secure.broker.address, credentials) as channel:
            for path in [*SERVED, HEALTH]:
                code, text = outcome(channel, path)
                if code not in expect(caller, path, rest.get(caller, StatusCode.UNAUTHENTICATED)):
                    wrong.append(f"{caller} at {path}: {code.name} {text}")
    return wrong


def test_with_certificates_every_role_gets_its_own_calls(certified: Secure) -> None:
    before = certified.keys()
    outsiders = {
        "": StatusCode.UNAVAILABLE,
        "expired": StatusCode.UNAVAILABLE,
        "stranger": StatusCode.UNAVAILABLE,
    }
    names = [*outsiders, "other-run", "learner", "broker", "client"]
    denied = {name: certified.credentials(name) for name in names}
    assert matrix(certified, denied, outsiders) == []
    assert certified.keys() == before
    assert certified.broker.refused("denied") >= len(SERVED)
    served = {
        name: certified.credentials(name) for name in ("operator", "actor", *(f"actor-{n}" for n in NAMES))
    }
    assert matrix(certified, served, {}) == []


def test_with_tokens_every_role_gets_its_own_calls(tokened: Secure) -> None:
    before = tokened.keys()
    callers = {name: tokened.credentials(name, token=True) for name in ("other-run", "stranger", "client")}
    assert matrix(tokened, {"": tokened.credentials(""), **callers}, {}) == []
    assert tokened.keys() == before
    assert tokened.broker.refused("unauthenticated") >= 2 * len(SERVED)
    served = {
        name: tokened.credentials(name, token=True) for name in ("operator", "actor", f"actor-{NAMES[0]}")
    }
    assert matrix(tokened, served, {}) == []


HEADERS: Final[dict[str, tuple[tuple[str, str | bytes], ...]]] = {
    "no scheme": (("authorization", "x"),),
    "another scheme": (("authorization", "Basic eDp5"),),
    "an empty token": (("authorization", "Bearer "),),
    "a digest in place of a token": (("authorization", "Bearer {digest}"),),
    "two tokens": (("authorization", "Bearer {token}"), ("authorization", "Bearer {token}")),
    "a token and more": (("authorization", "Bearer {token}x"),),
    "half a token": (("authorization", "Bearer {half}"),),
    "a long token": (("authorization", "Bearer " + "x" * 4096),),
    "under another name": (("token", "{token}"),),
    "as bytes": (("authorization-bin", b"Bearer"),),
}


def test_a_malformed_token_is_no_token(tokened: Secure) -> None:
    token = (tokened.folder / "operator.token").read_text().strip()
    known = {"token": token, "half": token[: len(token) // 2], "digest": digest(token)}
    with open_channel(tokened.broker.address, tokened.credentials("")) as channel:
        for what, given in HEADERS.items():
            metadata = [
                (key, value.format(**known) if isinstance(value, str) else value) for key, value in given
            ]
            code, text = outcome(channel, STATUS, metadata=metadata)
            assert code is StatusCode.UNAUTHENTICATED, (what, code, text)
            assert token[:8] not in text
        assert outcome(channel, STATUS, metadata=[("authorization", f"Bearer {token}")])[0] is StatusCode.OK


def test_a_revoked_or_new_token_takes_effect_at_once(tokened: Secure) -> None:
    tokens = tokened.folder / "tokens"
    own = tokened.credentials("operator", token=True)
    with open_channel(tokened.broker.address, own) as channel:
        assert outcome(channel, STATUS)[0] is StatusCode.OK
        main(Order(folder=tokened.folder / "new", run=RUN))
        replace(tokens, (tokened.folder / "new" / "tokens").read_text())
        assert outcome(channel, STATUS)[0] is StatusCode.UNAUTHENTICATED
        replace(tokened.folder / "operator.token", (tokened.folder / "new" / "operator.token").read_text())
        assert outcome(channel, STATUS)[0] is StatusCode.OK
        replace(tokens, "this is no file of tokens\n")
        assert outcome(channel, STATUS)[0] is StatusCode.OK, "a broken file changes nothing"


def test_only_the_two_newest_sets_of_tokens_are_accepted(tmp_path: Path) -> None:
    order = Order(folder=tmp_path, run=RUN)
    shown = []
    for _ in range(3):
        main(order)
        shown.append(f"Bearer {(tmp_path / 'operator.token').read_text().strip()}")
    known = AcceptedTokens(tmp_path / "tokens")
    assert known.identify(shown[2]) == known.identify(shown[1])
    with pytest.raises(Unidentified, match="not known"):
        known.identify(shown[0])


def test_an_unusable_line_of_the_token_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# ours\n{'0' * 64} penstock://{RUN}/unknown\n")
    with pytest.raises(ValueError, match=r"tokens:2: "):
        AcceptedTokens(tmp_path / "tokens")


def replace(path: Path, text: str) -> None:
    temporary = path.with_name("replacement")
    temporary.write_text(text)
    temporary.replace(path)


def test_a_token_is_never_sent_in_plaintext(tokened: Secure) -> None:
    token = (tokened.folder / "operator.token").read_bytes().strip()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                heard.extend(connection.recv(65536))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with open_channel(address, tokened.credentials("operator", token=True)) as channel:
            assert outcome(channel, STATUS)[0] is StatusCode.UNAVAILABLE
        thread.join(PATIENCE_S)
    assert heard
    assert token not in heard
    assert b"authorization" not in heard


class TlsActor(SimulatedActor):
    """A simulated actor with a certificate."""

    def __init__(self, secure: Secure, name: str, actor_id: str) -> None:
        super().__init__(secure.broker.address, actor_id, Role.ROLLOUT)
        self.channel.close()
        self.channel = open_channel(secure.broker.address, secure.credentials(name))
        self.experience = experience_pb2_grpc.ExperienceServiceStub(self.channel)
        self.weights = weights_pb2_grpc.WeightServiceStub(self.channel)


def theft(thief: SimulatedActor, session: int) -> dict[str, Callable[[], Any]]:
    append = experience_pb2.AppendRequest(session=session)
    append.fragments.add()
    report = experience_pb2.ReportEpisodesRequest(session=session, sequence=1)
    watch = weights_pb2.WatchLatestRequest(session=session)
    chunk = weights_pb2.GetWeightsRequest(session=session, version=1)
    close = experience_pb2.CloseSessionRequest(session=session)
    return {
        "Append": lambda: thief.experience.Append(append, timeout=PATIENCE_S),
        "ReportEpisodes": lambda: thief.experience.ReportEpisodes(report, timeout=PATIENCE_S),
        "WatchLatest": lambda: thief.weights.WatchLatest(watch, timeout=PATIENCE_S),
        "GetWeights": lambda: thief.weights.GetWeights(chunk, timeout=PATIENCE_S),
        "CloseSession": lambda: thief.experience.CloseSession(close, timeout=PATIENCE_S),
    }


def test_a_session_belongs_to_the_identity_that_opened_it(certified: Secure) -> None:
    first, second = NAMES
    with (
        TlsActor(certified, f"actor-{first}", first) as owner,
        TlsActor(certified, f"actor-{second}", second) as thief,
    ):
        owner.open()
        owner.send(fragment(owner.session, 1))
        before = certified.keys()
        for what, attempt in theft(thief, owner.session).items():
            with pytest.raises(grpc.RpcError) as caught:
                attempt()
            code, text = code_of(caught.value)
            assert code is StatusCode.PERMISSION_DENIED, what
            assert "did not open it" in text, what
        assert certified.keys() == before
        assert owner.send(fragment(owner.session, 2)).acked_through == 2


def test_while_redis_is_away_the_owner_of_another_brokers_session_is_told_to_wait(
    certified: Secure, tmp_path: Path
) -> None:
    name = NAMES[0]
    with (
        harness.broker(certified.server.url, tmp_path, settings=certified.settings) as other,
        TlsActor(certified, f"actor-{name}", name) as actor,
        TlsActor(dataclasses.replace(certified, broker=other), f"actor-{name}", name) as moved,
    ):
        actor.open()
        moved.session = actor.session
        certified.server.kill()
        opening = experience_pb2.OpenSessionRequest(actor_id=name, role=experience_pb2.ROLE_ROLLOUT)
        report = experience_pb2.ReportEpisodesRequest(session=moved.session, sequence=1)
        told = {
            "OpenSession": refusal_of(moved.experience.OpenSession(opening, timeout=PATIENCE_S)),
            "Append": refusal_of(moved.send(fragment(moved.session, 1))),
            "ReportEpisodes": refusal_of(moved.experience.ReportEpisodes(report, timeout=PATIENCE_S)),
            "WatchLatest": refusal_of(moved.watch()),
        }
        calls = theft(moved, moved.session)
        for what in ("GetWeights", "CloseSession"):
            with pytest.raises(grpc.RpcError) as caught:
                calls[what]()
            assert code_of(caught.value)[0] is StatusCode.UNAVAILABLE, what
    assert {what: refusal.reason for what, refusal in told.items()} == {
        "OpenSession": Reason.NOT_READY,
        "Append": Reason.FULL,
        "ReportEpisodes": Reason.FULL,
        "WatchLatest": Reason.NOT_READY,
    }
    assert all(refusal.retry_after_ms > 0 for refusal in told.values())


def test_the_log_says_who_did_what(certified: Secure) -> None:
    broker, name = certified.broker, f"actor-{NAMES[0]}"
    broker_client = BrokerClient(broker.address, certified.credentials(name))
    opened = broker_client.open_session(NAMES[0], Role.ROLLOUT, threading.Event())
    assert isinstance(opened, SessionReply)
    broker_client.close_session(opened.session, PATIENCE_S)
    broker_client.close()
    with open_channel(broker.address, certified.credentials("operator")) as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        control.Pause(control_pb2.ControlRequest(reason="lunch\r\x1b[2Jsession"), timeout=PATIENCE_S)
    told = broker.log.read_text()
    by = f"by=penstock://{RUN}/actor/{NAMES[0]}"
    assert f"session opened session={opened.session} actor={NAMES[0]} acts_as=rollout {by}" in told
    assert f"session closed session={opened.session} {by}" in told
    pause = f"command=pause by=penstock://{RUN}/operator reason='lunch\\r\\x1b[2Jsession' revision="
    assert pause in told


def test_a_certificate_with_a_name_acts_only_under_it(certified: Secure) -> None:
    first, second = NAMES
    with (
        TlsActor(certified, f"actor-{first}", f"{first}-0") as owner,
        TlsActor(certified, f"actor-{second}", f"{first}-0") as thief,
    ):
        owner.open()
        with pytest.raises(grpc.RpcError) as caught:
            thief.open()
        code, text = code_of(caught.value)
        assert code is StatusCode.PERMISSION_DENIED
        assert f"may act as '{second}'" in text
        assert owner.send(fragment(owner.session, 1)).acked_through == 1


def test_replaced_certificates_are_used_without_a_restart(certified: Secure, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for path in certified.folder.glob("a*.*"):
        (old / path.name).write_bytes(path.read_bytes())
    first = NAMES[0]
    before = served_certificate(certified.broker.address)
    with (
        TlsActor(certified, f"actor-{first}", first) as actor,
        closing(open_channel(certified.broker.address, certified.credentials("operator"))) as operator,
    ):
        actor.open()
        held: list[Any] = []
        watch = threading.Thread(target=lambda: held.append(actor.watch(wait_ms=15_000, **NOTHING_NEW)))
        watch.start()
        held_calls = re.compile(r"watchers\S* 1\.0$", re.MULTILINE)
        eventually(lambda: held_calls.search(certified.broker.get("/metrics")[1]), "a held call")
        renew(certified.folder)
        assert served_certificate(certified.broker.address) != before
        assert outcome(operator, STATUS)[0] is StatusCode.OK, "the operator's channel was built anew"
        assert actor.send(fragment(actor.session, 1)).acked_through == 1
        watch.join(PATIENCE_S)
        assert held, "the held call ended on its old connection"
    stale = Credentials.from_files(
        insecure=False,
        certificate=old / f"actor-{first}.pem",
        key=old / f"actor-{first}.key",
        authority=certified.folder / "authority.pem",
    )
    with open_channel(certified.broker.address, stale) as channel:
        assert outcome(channel, HEALTH)[0] is StatusCode.UNAVAILABLE, "the old authority counts no more"


def renew(folder: Path) -> None:
    (folder / "authority.key").unlink()
    main(Order(folder=folder, run=RUN, actors=NAMES))


def served_certificate(address: str) -> str:
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S)


def test_a_new_certificate_without_its_key_is_not_used(certified: Secure) -> None:
    key = certified.folder / "broker.key"
    good = key.read_text()
    replace(key, (certified.folder / "actor.key").read_text())
    with open_channel(certified.broker.address, certified.credentials("operator")) as channel:
        assert outcome(channel, STATUS)[0] is StatusCode.OK
    replace(key, good)
    assert "TLS files cannot be used now" in certified.broker.log.read_text()


def test_an_actor_cannot_pass_for_the_broker(certified: Secure) -> None:
    listener = grpc.server(ThreadPoolExecutor(1))
    pair = ((certified.folder / "actor.key").read_bytes(), (certified.folder / "actor.pem").read_bytes())
    port = listener.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    listener.start()
    with open_channel(f"127.0.0.1:{port}", certified.credentials("operator")) as channel:
        assert outcome(channel, STATUS)[0] is StatusCode.UNAVAILABLE
    listener.stop(0)


REFUSED: Final = {
    "plaintext beyond loopback": (
        {"tls_certificate": None, "tls_key": None, "tls_authority": None}, RUN, "0.0.0.0:0", "--insecure"
    ),
    "TLS that asks for none": ({"tls_authority": None}, RUN, "127.0.0.1:0", "callers would show no proof"),
    "certificates of no run": ({}, "", "127.0.0.1:0", "--set run=NAME"),
    "another's key": ({"tls_key": "actor.key"}, RUN, "127.0.0.1:0", "its own key"),
    "a file that is not there": ({"tls_authority": "gone.pem"}, RUN, "127.0.0.1:0", "gone.pem"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "run", "listen", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_broker_that_could_not_identify_its_callers_does_not_start(
    tmp_path: Path, files: dict[str, str | None], run: str, listen: str, message: str
) -> None:
    main(Order(folder=tmp_path, run=RUN))
    good = {"tls_certificate": "broker.pem", "tls_key": "broker.key", "tls_authority": "authority.pem"}
    named = {**good, **files}
    security = {key: str(tmp_path / name) for key, name in named.items() if name is not None}
    settings = {"run": run, "security": security}
    broker = launch("unix:///absent", tmp_path / "broker", listen=listen, settings=settings)
    code, last = broker.wait()
    assert code == 2
    assert message in broker.log.read_text(), last


def test_a_broker_with_a_certificate_of_another_run_does_not_start(certified: Secure, tmp_path: Path) -> None:
    broker = launch(certified.server.url, tmp_path, settings={"run": OTHER_RUN})
    code, last = broker.wait()
    assert code == 1
    assert repr(RUN) in last
    assert repr(OTHER_RUN) in last


def test_a_flood_of_one_caller_slows_only_that_caller(short_folder: Path) -> None:
    first, second = NAMES
    with secured(short_folder, max_calls_per_s=5) as secure:
        loud = [open_channel(secure.broker.address, secure.credentials(f"actor-{first}")) for _ in range(2)]
        quiet = open_channel(secure.broker.address, secure.credentials(f"actor-{second}"))
        path = "/penstock.v1.ExperienceService/CloseSession"
        message = experience_pb2.CloseSessionRequest(session=7).SerializeToString()
        calls = [
            channel.unary_unary(path, None, None).future(message, timeout=PATIENCE_S)
            for _ in range(60)
            for channel in loud
        ]
        assert outcome(quiet, path, message)[0] is StatusCode.OK
        codes = [call.code() for call in calls]
        assert codes.count(StatusCode.RESOURCE_EXHAUSTED) >= 60
        assert codes.count(StatusCode.OK) >= 5
        assert {*codes} == {StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}
        assert "broker.max_calls_per_s" in next(c for c in calls if c.code() is not StatusCode.OK).details()
        assert secure.broker.refused("budget") >= 60
        for channel in (*loud, quiet):
            channel.close()


def test_bytes_are_counted_too(short_folder: Path) -> None:
    first, second = NAMES
    with secured(short_folder, max_bytes_per_s=1024 * 1024) as secure:
        large = b"\x0a" + b"\x80\x80\x80\x02" + b"x" * (4 * 1024 * 1024)
        path = "/penstock.v1.ExperienceService/Append"
        with open_channel(secure.broker.address, secure.credentials(f"actor-{first}")) as loud:
            codes = [outcome(loud, path, large)[0] for _ in range(8)]
            assert codes[0] is not StatusCode.RESOURCE_EXHAUSTED
            assert codes[-1] is StatusCode.RESOURCE_EXHAUSTED
        with open_channel(secure.broker.address, secure.credentials(f"actor-{second}")) as quiet:
            assert outcome(quiet, path)[0] is StatusCode.INVALID_ARGUMENT


def hold(actor: TlsActor) -> Any:
    """A call that is held for its whole wait: nothing is new for ever."""
    request = weights_pb2.WatchLatestRequest(session=actor.session, wait_ms=20_000, **NOTHING_NEW)
    return actor.weights.WatchLatest.future(request, timeout=PATIENCE_S)


def test_calls_and_connections_are_bounded(short_folder: Path) -> None:
    with secured(short_folder, max_concurrent_calls=2, max_connections=3) as secure:
        actors = [TlsActor(secure, "actor", f"actor-{index}") for index in range(2)]
        for actor in actors:
            actor.open()
        operator = open_channel(secure.broker.address, secure.credentials("operator"))
        held = [hold(actor) for actor in actors]

        def is_full() -> bool:
            # One that came before the call before it was over was refused.
            held[:] = [hold(a) if call.done() else call for a, call in zip(actors, held, strict=True)]
            return outcome(operator, STATUS)[0] is StatusCode.RESOURCE_EXHAUSTED

        eventually(is_full, within_s=PATIENCE_S)
        with open_channel(secure.broker.address, secure.credentials("operator")) as fourth:
            assert outcome(fourth, STATUS)[0] is StatusCode.UNAVAILABLE
        for call in held:
            call.cancel()
        eventually(lambda: outcome(operator, STATUS)[0] is StatusCode.OK, within_s=PATIENCE_S)
        operator.close()
        for actor in actors:
            actor.channel.close()


def test_an_old_connection_is_renewed_and_the_actor_continues(short_folder: Path) -> None:
    ports: set[str] = set()
    with secured(short_folder, max_connection_age_s=0.5) as secure:
        broker_client = BrokerClient(secure.broker.address, secure.credentials("actor"))
        while len(ports) < 3:
            assert isinstance(
                broker_client.open_session("actor-0", Role.ROLLOUT, threading.Event()), SessionReply
            )
            ports |= client_ports(secure.broker.address)
        broker_client.close()


def client_ports(address: str) -> set[str]:
    wanted = f":{int(address.rpartition(':')[2]):04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    established = "01"
    return {row[1] for row in rows if row[2].endswith(wanted) and row[3] == established}
