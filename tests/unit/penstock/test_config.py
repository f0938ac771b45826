import ast
import functools
import inspect
import itertools
import logging
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis.connection
from pydantic import BaseModel

from penstock.config import workload
from penstock.config.algorithm_sections import SECTIONS, TokenPPOSection, algorithm_sections
from penstock.config.credentials import registry_with_password
from penstock.config.settings import (
    AlgorithmSection,
    ConfigurationError,
    ImpalaSection,
    PPOSection,
    RegistrySection,
    Section,
    Settings,
    dump,
    from_environment,
    load,
    merge,
    parse_assignment,
    parse_toml,
    shown,
)
from penstock.config.trusted import SEAL_FILE, check_own, modules_of, placed, seal, without_places
from penstock.config.url_secrets import secret_in, split_password
from penstock.config.workload import default_workload, find, installed, record_of
from penstock.config.workload import load as workload_load
from penstock.launch.cli.plugin_commands import check_words


def test_the_password_of_a_registry_comes_from_its_file_or_the_url_is_what_it_was(tmp_path: Path) -> None:
    file, url = tmp_path / "password", "postgresql://penstock@db:5432/versions"
    file.write_text("a/b@c:d \n")
    joined = registry_with_password(RegistrySection(url=url, password_file=file))
    assert joined == "postgresql://penstock:a%2Fb%40c%3Ad@db:5432/versions"
    assert registry_with_password(RegistrySection(url=url)) == url
    assert registry_with_password(RegistrySection(password_file=tmp_path / "absent")) == ""
    for other, message in (
        (url, "registry.password_file=.*absent: No such file"),
        ("sqlite:////tmp/registry.sqlite", "only a postgresql:// registry has a password; leave it out"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            registry_with_password(RegistrySection(url=other, password_file=tmp_path / "absent"))


RECORD = """
from types import SimpleNamespace

WORKLOAD = SimpleNamespace(algorithms={algorithms!r})
"""
SECTION = """
from typing import Literal

from penstock.config.algorithm_sections import AlgorithmSection


class Section(AlgorithmSection):
    name: Literal["mine"] = "mine"
    width: tuple[int, ...] = (3,)


class NoSection:
    pass
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, algorithms: dict[str, str]) -> None:
    """A package of that name with a record, as an installer leaves it."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[penstock.workloads]\n{name} = {name}_record:WORKLOAD\n")
    (folder / f"{name}_record.py").write_text(RECORD.format(algorithms=algorithms))
    (folder / f"{name}_sections.py").write_text(SECTION)
    monkeypatch.syspath_prepend(folder)
    for module in (f"{name}_record", f"{name}_sections"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_a_workloads_section_is_read_and_written_like_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "outside", {"mine": "outside_sections:Section"})
    settings = load([{"algorithm": {"name": "mine", "width": [5, 7]}}])
    assert settings.algorithm.model_dump()["width"] == (5, 7)
    assert load([settings.model_dump()]) == settings
    with pytest.raises(
        ConfigurationError, match=r"algorithm\.depth: unknown key;.* of algorithm\.name='mine'"
    ):
        load([{"algorithm": {"name": "mine", "depth": 1}}])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("outside_sections:NoSection", "is no AlgorithmSection"),
        ("outside_sections:Missing", "cannot be loaded"),
        ("nowhere:Section", "cannot be loaded"),
        ("outside_broken:Section", "importing it raised SyntaxError: .*python -c 'import outside_broken'"),
        ("outside_failing:Section", "importing it raised ZeroDivisionError"),
    ],
)
def test_an_unusable_section_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    install(tmp_path, monkeypatch, "outside", {"mine": path})
    (tmp_path / "outside_broken.py").write_text("def Section(:\n")
    (tmp_path / "outside_failing.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError, match=message):
        load([{"algorithm": {"name": "mine"}}])
    load([{"algorithm": {"name": "ppo"}}])


def test_two_workloads_do_not_give_one_name_to_two_algorithms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert {"control", "rlhf"} <= set(installed())
    shared = {"token_ppo": "penstock.config.algorithm_sections:TokenPPOSection"}
    install(tmp_path / "a", monkeypatch, "first", shared)
    assert algorithm_sections()["token_ppo"] is TokenPPOSection
    install(tmp_path / "b", monkeypatch, "second", {"token_ppo": "second_sections:Section"})
    with pytest.raises(ConfigurationError, match="its section for algorithm.name='token_ppo' differs"):
        algorithm_sections()


def test_a_module_that_moved_below_penstock_is_named_with_its_new_name() -> None:
    with pytest.raises(ConfigurationError, match="it is penstock.workloads.goals.live_host:target$"):
        workload.load("workloads.goals.live_host:target")


def test_a_run_without_a_workload_gets_the_one_that_claims_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record_of(Settings().workload).default is True
    default_workload.cache_clear()
    install(tmp_path, monkeypatch, "outside", {})
    assert default_workload() == "control"
    default_workload.cache_clear()
    with (tmp_path / "outside_record.py").open("a") as file:
        file.write("WORKLOAD.default = True\n")
    monkeypatch.delitem(sys.modules, "outside_record")
    with pytest.raises(ConfigurationError, match=r"claim to be the default: control, outside; set workload="):
        default_workload()


def test_a_record_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "outside", {})
    (tmp_path / "outside_record.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(
        ConfigurationError, match=r"workload='outside': outside_record:WORKLOAD cannot be loaded"
    ):
        record_of("outside")


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("redis://:hunter2@host:6379/0", "redis://host:6379/0", "hunter2"),
        ("rediss://user:hun%2Fter@host/?a=1", "rediss://user@host/?a=1", "hun/ter"),
        ("redis://user@host:6379", "redis://user@host:6379", None),
        ("redis://host?password=hunter2&db=1", "redis://host?db=1", "hunter2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", None),
        ("unix://:hunter2@/run/redis.sock?db=0", "unix:///run/redis.sock?db=0", "hunter2"),
        ("redis://user:@host", "redis://user@host", None),
        ("redis://:a@b@host", "redis://host", "a@b"),
        ("redis://[::1", "redis://[::1", None),
        ("redis://u:hunter2@[::1", "redis://u@[::1", "hunter2"),
        ("", "", None),
    ],
)
def test_a_redis_url_is_shown_without_its_password(url: str, shown: str, password: str | None) -> None:
    assert split_password(url) == (shown, password)


@pytest.mark.parametrize(
    "url", ["redis://u:p%40x@h:1/2", "redis://h?password=x", "unix://u:p@/run/r.sock?db=3", "rediss://:p@h"]
)
def test_an_address_and_its_password_connect_like_the_whole_url(url: str) -> None:
    shown, password = split_password(url)
    parsed = {**redis.connection.parse_url(shown), "password": password}  # type: ignore[no-untyped-call]
    assert parsed == dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]


WITH_MODULE = {"actor": {"allow_modules": ["mine"]}}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def made(folder: Path, settings: Settings) -> Path:
    folder.mkdir()
    seal(folder, settings)
    return folder


def refused(folder: Path, settings: Settings) -> bool:
    try:
        check_own(folder, settings, ())
    except ConfigurationError:
        return True
    return False


def test_a_folder_made_here_is_trusted(state: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", load([WITH_MODULE]))
    assert not refused(folder, load([WITH_MODULE]))
    key = state / "penstock" / "seal.key"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [file.name for file in key.parent.iterdir()] == [key.name]


@pytest.mark.promise("folder-made-here-module")
def test_a_run_with_other_modules_folder_or_user_is_foreign(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load([WITH_MODULE])
    without_modules = made(tmp_path / "plain", Settings())
    assert not refused(without_modules, Settings())
    assert list(without_modules.iterdir()) == []
    assert not state.exists()
    folder = made(tmp_path / "run", settings)
    assert refused(folder, load([{"actor": {"allow_modules": ["mine", "theirs"]}}]))
    assert refused(folder, load([WITH_MODULE, {"policy": {"network": "theirs:Net"}}]))
    moved = folder.rename(tmp_path / "moved")
    assert refused(moved, settings)
    folder = moved.rename(folder)
    assert not refused(folder, settings)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert refused(folder, settings)
    made(tmp_path / "another", settings)
    assert refused(folder, settings)
    (folder / SEAL_FILE).unlink()
    assert refused(folder, settings)


def test_allowed_modules_and_places_need_no_trust(state: Path, tmp_path: Path) -> None:
    check_own(tmp_path, load([WITH_MODULE]), ("mine", "other"))
    with pytest.raises(ConfigurationError, match=r"to be imported: mine; say --trust"):
        check_own(tmp_path, load([WITH_MODULE]), ("other",))


def test_without_a_key_file_the_folder_is_reported_as_untrusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        folder = made(tmp_path / "run", load([WITH_MODULE]))
    assert "will require --trust" in caplog.text
    assert refused(folder, load([WITH_MODULE]))


def test_the_modules_are_those_imported_by_any_setting() -> None:
    said = {
        "environment": {"id": "a:X-v0", "reward": [{"shape": "b:phi"}]},
        "policy": {"network": "c:Net"},
        "actor": {"allow_modules": ["d"], "places": {"reward": "e.f:score", "model": "/m", "x": "unix:/s"}},
    }
    assert modules_of(load([said])) == ("a", "b", "c", "d", "e.f")


def test_arguments_of_the_environment_are_replaced_as_a_whole_or_laid_on_the_others_one_by_one() -> None:
    file = {"environment": {"kwargs": {"a": 1, "deep": {"x": 1, "y": 2}}}}
    said = ["environment.kwargs.b=2", "environment.kwargs.a=3", "environment.kwargs.deep.x=5"]

    def kwargs(*assignments: str, base: Mapping[str, Any] = file) -> Any:
        layers = [base, *(parse_assignment(one) for one in assignments)]
        return functools.reduce(merge, layers)["environment"]["kwargs"]

    assert kwargs(*said) == {"a": 3, "b": 2, "deep": {"x": 5, "y": 2}}
    assert kwargs(*said[:2], base={}) == {"a": 3, "b": 2}
    assert kwargs(*said, "environment.kwargs={c = 4}") == {"c": 4}
    assert merge(file, {"environment": {"kwargs": {"b": 2}}})["environment"]["kwargs"] == {"b": 2}
    assert kwargs("environment.kwargs={c = 4}", "environment.kwargs.d=5") == {"c": 4, "d": 5}
    others = {"PENSTOCK_LIFELINE_FD": "3", "HOME": "/root"}
    variables = {f"PENSTOCK_ENVIRONMENT__KWARGS__{name}": "7" for name in ("E", "F")}
    assert from_environment(variables | others) == {"environment": {"kwargs": {"e": 7, "f": 7}}}
    assert merge(file, from_environment(variables))["environment"]["kwargs"].keys() == {"a", "deep", "e", "f"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=3", {"seed": 3}),
        ("algorithm.learning_rate=1e-3", {"algorithm": {"learning_rate": 1e-3}}),
        ("policy.hidden_sizes=[32, 32]", {"policy": {"hidden_sizes": [32, 32]}}),
        ("environment.id=CartPole-v1", {"environment": {"id": "CartPole-v1"}}),
        ("environment.id=a=b", {"environment": {"id": "a=b"}}),
        ("learner.stop_at_target=false", {"learner": {"stop_at_target": False}}),
        ("environment.kwargs.g=9.8", {"environment": {"kwargs": {"g": 9.8}}}),
        ("security.redis_password=123", {"security": {"redis_password": "123"}}),
    ],
)
def test_an_assignment_is_toml_or_a_string(text: str, expected: dict[str, Any]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3", ""])
def test_an_assignment_without_key_or_value_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write section\.key=value"):
        parse_assignment(text)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"algorithm": {"epoch": 1}}, r"algorithm\.epoch: unknown key; .*--print-config"),
    "unknown section": ({"algo": {}}, "algo: unknown key"),
    "out of range": ({"algorithm": {"epochs": 0}}, r"algorithm\.epochs=0: .*greater than 0"),
    "not a number": ({"seed": "many"}, "seed='many': .*integer"),
    "true for a number": ({"actor": {"count": True}}, r"actor\.count=True: .*is no number; write one"),
    "not a choice": ({"algorithm": {"advantage": "td"}}, r"algorithm\.advantage='td': .*'gae' or 'vtrace'"),
    "unknown key of an algorithm": (
        {"algorithm": {"name": "impala", "epochs": 1}},
        r"algorithm\.epochs: unknown key; .*--print-config.* of algorithm\.name='impala'",
    ),
    "unknown algorithm": (
        {"algorithm": {"name": "apo"}},
        r"algorithm\.name='apo': not known; use 'ppo', 'impala', 'reinforce', .*'token_ppo'",
    ),
    "no section of an algorithm": ({"algorithm": 3}, r"algorithm=3: .*dictionary"),
    "password in a URL": (
        {"registry": {"url": "postgresql://ada:hunter2@db/penstock"}},
        r"registry\.url=postgresql://…db: holds a secret in its user-info.*registry\.password_file=FILE",
    ),
    "a floor above the start": (
        {"algorithm": {"entropy_coefficient": 0.01, "entropy_decay": 0.9, "entropy_floor": 0.1}},
        r"algorithm\.entropy_floor=0\.1: .*above entropy_coefficient=0\.01",
    ),
    "two schedules of the rate": (
        {"algorithm": {"adaptive_kl": 0.01, "learning_rate_schedule": "linear"}},
        r"algorithm\.adaptive_kl=0\.01: .*learning_rate_schedule=linear sets the rate, too",
    ),
    "a range upside down": (
        {"algorithm": {"learning_rate_range": (1e-2, 1e-3)}},
        r"algorithm\.learning_rate_range=.*lowest",
    ),
    "not finite": ({"algorithm": {"learning_rate": float("nan")}}, r"algorithm\.learning_rate=nan"),
}


@pytest.mark.parametrize(("layer", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_key_value_and_allowed_values(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load([layer])


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load([{"algorithm": {"epochs": 0, "epoch": 1}, "seed": -1}])
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[algorithm]\nepochs = 2\n")
    assert parse_toml(path) == {"algorithm": {"epochs": 2}}
    path.write_text("[algorithm\n")
    with pytest.raises(ConfigurationError, match=r"run\.toml: not TOML: .*line 1"):
        parse_toml(path)
    with pytest.raises(ConfigurationError, match=r"absent\.toml: No such file"):
        parse_toml(tmp_path / "absent.toml")


def fields_of(section: Section) -> dict[str, bool]:
    """Every field of a section and of those in it, and whether it is advanced."""
    found: dict[str, bool] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            found |= {f"{name}.{inner}": advanced for inner, advanced in fields_of(value).items()}
        else:
            found[name] = section.is_advanced(name)
    return found


def test_advanced_settings_are_shown_on_request_or_where_they_are_set() -> None:
    settings = load([{"broker": {"max_connections": 7}, "policy": {"dueling": False}}])
    short, whole = (shown(settings, advanced=advanced) for advanced in (False, True))
    assert tomllib.loads(whole) == tomllib.loads(dump(settings))
    parsed = tomllib.loads(short)
    assert parsed["broker"]["max_connections"] == 7
    assert "dueling" not in parsed["policy"]
    assert load([parsed]) == settings
    advanced = fields_of(settings).values()
    assert f"# {sum(advanced) - 1} advanced settings stand at their defaults" in short
    assert len(advanced) - sum(advanced) <= 112, "few are shown by default"


def test_the_algorithms_name_in_any_layer_chooses_the_section() -> None:
    assert isinstance(load([{"algorithm": {"batch_steps": 5}}]).algorithm, PPOSection)
    layers = [
        {"algorithm": {"batch_steps": 5}},
        from_environment({"PENSTOCK_ALGORITHM__NAME": "reinforce", "PENSTOCK_ALGORITHM__RHO_CLIP": "2"}),
        parse_assignment("algorithm.name=impala"),
    ]
    assert load(layers).algorithm == ImpalaSection(batch_steps=5, rho_clip=2.0)


def test_secrets_are_not_printed() -> None:
    settings = load([{"security": {"redis_password": "hunter2"}}])
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.model_dump_json()


def algorithms() -> dict[str, type[AlgorithmSection]]:
    return {**SECTIONS, **algorithm_sections()}


@pytest.mark.parametrize("name", algorithms())
def test_the_settings_of_every_algorithm_read_back_equal(name: str) -> None:
    settings = load([{"algorithm": {"name": name}}])
    assert type(settings.algorithm) is algorithms()[name]
    assert load([settings.model_dump()]) == settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def sections() -> dict[str, type[BaseModel]]:
    annotated = {name: field.annotation for name, field in Settings.model_fields.items()}
    plain = {
        name: kind
        for name, kind in annotated.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    return plain | {f"algorithm.{name}": kind for name, kind in algorithms().items()}


def help_of(section: type[BaseModel]) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in section.__mro__ if issubclass(kind, Section)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in itertools.pairwise(tree.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = inspect.cleandoc(words)
    return found


@pytest.mark.parametrize("name", sections())
def test_every_section_has_a_bounded_number_of_knobs_with_help(name: str) -> None:
    section, helped = sections()[name], help_of(sections()[name])
    assert all(field.description or key in helped for key, field in section.model_fields.items())
    assert len(section.model_fields) <= {"actor": 25, "broker": 25}.get(name, 40)


KEYS = ("model", "prompts")


def test_a_place_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"policy\.kwargs\.model: places are not taken .*actor\.places\.model",
    ):
        placed("policy.kwargs", {"model": "/theirs"}, KEYS, {})


def test_a_specification_names_the_kinds_of_paths_but_no_path() -> None:
    own = {"model": "/mine", "prompts": "", "group": 4, "feedback": "postgresql://ann@db/x"}
    told = without_places(own, KEYS, ("feedback",))
    assert told == {"model": True, "prompts": "", "group": 4}
    here = placed("environment.kwargs", told, KEYS, {"model": "/here", "prompts": "/unused"})
    assert here == {"model": "/here", "prompts": "", "group": 4}
    assert placed("environment.kwargs", {"model": "x"}, (), {}) == {"model": "x"}


@pytest.mark.parametrize(
    "name",
    [
        "password", "api_key", "apiKey", "secretKey", "privatekey", "x-signing-key", "access_token", "jwt",
        "X-Amz-Signature", "key",
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["?", "?a=1&", "?a=1;", "#", "?a=1#b=2&"])
def test_a_secret_in_query_or_fragment_is_found_by_its_name(name: str, before: str) -> None:
    found = secret_in(f"http://h/score{before}{name}=s3cret")
    assert found is not None
    assert found.startswith(repr(name))
    for harmless in ("monkey=1", "keyboard=de", "author=ann", "signal=9", "token=", "page=2"):
        assert secret_in(f"http://h/score?{harmless}#top") is None


@pytest.mark.parametrize("scheme", ["postgresql", "POSTGRESQL", "postgresql+psycopg2", "http", "s3"])
@pytest.mark.parametrize("before", ["", "--registry=", "--set=registry.url=", "environment.kwargs.reward="])
def test_a_word_of_a_command_line_with_a_secret_is_refused(scheme: str, before: str) -> None:
    with pytest.raises(ConfigurationError, match="holds a secret in its user-info") as caught:
        check_words([f"{before}{scheme}://u:s3cret@h/d"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:///runs/registry.sqlite?password=s3cret", "SQLite asks for none, so leave it out"),
        ("postgresql://h/d?password=s3cret", "registry.password_file=FILE"),
        ("redis://h?password=s3cret", "security.redis_password_file=FILE"),
        ("https://h/score?token=s3cret", "security.http_headers_file=FILE"),
    ],
)
def test_the_remedy_depends_on_the_url_scheme(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        check_words([url])
    assert "s3cret" not in str(caught.value)


def test_the_installed_control_workload_is_found_and_its_paths_load() -> None:
    workload = find("control")
    assert workload.name == "control"
    for path in (workload.environment, workload.spaces, workload.policy, workload.defaults, workload.target):
        assert callable(workload_load(path))


@pytest.mark.parametrize("path", ["", "nowhere:f", "os:nothing", "os", "os:name"])
def test_a_workload_or_path_that_there_is_not_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a function|cannot be loaded"):
        workload_load(path)
    with pytest.raises(ConfigurationError, match=r"workload='chess'.*installed: .*control"):
        find("chess")
