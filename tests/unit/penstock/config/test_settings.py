import ast
import functools
import inspect
import itertools
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.config.algorithm_sections import SECTIONS, algorithm_sections
from penstock.config.settings import (
    AlgorithmSection,
    ConfigurationError,
    ImpalaSection,
    PPOSection,
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


def test_later_layers_win_key_by_key() -> None:
    settings = load(
        [
            {"algorithm": {"batch_steps": 512, "epochs": 8}},
            {"algorithm": {"epochs": 3}, "seed": 1},
            parse_assignment("seed=2"),
        ]
    )
    assert isinstance(settings.algorithm, PPOSection)
    assert (settings.algorithm.batch_steps, settings.algorithm.epochs, settings.seed) == (512, 3, 2)


def test_arguments_of_the_environment_are_replaced_as_a_whole() -> None:
    merged = merge({"environment": {"kwargs": {"a": 1}}}, {"environment": {"kwargs": {"b": 2}}})
    assert merged["environment"]["kwargs"] == {"b": 2}


def test_an_argument_that_is_assigned_by_itself_is_laid_on_the_others() -> None:
    file = {"environment": {"kwargs": {"a": 1, "deep": {"x": 1, "y": 2}}}}
    said = ["environment.kwargs.b=2", "environment.kwargs.a=3", "environment.kwargs.deep.x=5"]

    def kwargs(*assignments: str, base: Mapping[str, Any] = file) -> Any:
        layers = [base, *(parse_assignment(one) for one in assignments)]
        return functools.reduce(merge, layers)["environment"]["kwargs"]

    assert kwargs(*said) == {"a": 3, "b": 2, "deep": {"x": 5, "y": 2}}
    assert kwargs(*said[:2], base={}) == {"a": 3, "b": 2}
    assert kwargs(*said, "environment.kwargs={c = 4}") == {"c": 4}
    assert kwargs("environment.kwargs={c = 4}", "environment.kwargs.d=5") == {"c": 4, "d": 5}
    variables = {f"PENSTOCK_ENVIRONMENT__KWARGS__{name}": "7" for name in ("E", "F")}
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
def test_an_assignment_without_key_or_value_is_told_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write section\.key=value"):
        parse_assignment(text)


def test_the_environment_is_read_by_prefix() -> None:
    environ = {"PENSTOCK_ALGORITHM__EPOCHS": "7", "PENSTOCK_LIFELINE_FD": "3", "HOME": "/root"}
    assert from_environment(environ) == {"algorithm": {"epochs": 7}}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"algorithm": {"epoch": 1}}, r"algorithm\.epoch: unknown key; .*--print-config"),
    "unknown section": ({"algo": {}}, "algo: unknown key"),
    "out of range": ({"algorithm": {"epochs": 0}}, r"algorithm\.epochs=0: .*greater than 0"),
    "not a number": ({"seed": "many"}, "seed='many': .*integer"),
    "more threads than machines have": ({"learner": {"threads": 2**53}}, r"learner\.threads=.*1024"),
    "a deviation that overflows": (
        {"policy": {"initial_log_std": 1e300}},
        r"policy\.initial_log_std=.*20",
    ),
    "a weight that overflows": (
        {"algorithm": {"entropy_coefficient": 1e300}},
        r"algorithm\.entropy_coefficient=.*1000000",
    ),
    "true for a number": ({"actor": {"count": True}}, r"actor\.count=True: .*is no number; write one"),
    "true for a real number": (
        {"algorithm": {"dual_clip": True}},
        r"algorithm\.dual_clip=True: .*is no number",
    ),
    "a layer of absurd width": ({"policy": {"recurrent_size": 2**40}}, r"policy\.recurrent_size=.*65536"),
    "not a choice": ({"algorithm": {"advantage": "td"}}, r"algorithm\.advantage='td': .*'gae' or 'vtrace'"),
    "unknown key of an algorithm": (
        {"algorithm": {"name": "impala", "epochs": 1}},
        r"algorithm\.epochs: unknown key; .*--print-config.* of algorithm\.name='impala'",
    ),
    "unknown algorithm": (
        {"algorithm": {"name": "apo"}},
        r"algorithm\.name='apo': not known; use 'ppo', 'impala', 'reinforce'",
    ),
    "no section of an algorithm": ({"algorithm": 3}, r"algorithm=3: .*dictionary"),
    "password in a URL": (
        {"registry": {"url": "postgresql://ada:hunter2@db/penstock"}},
        r"registry\.url=postgresql://…db: holds a secret in its user-info.*registry\.password_file=FILE",
    ),
    "a fraction above 1": (
        {"algorithm": {"discount": 1.5}},
        r"algorithm\.discount=1\.5: .*less than or equal to 1",
    ),
    "not finite": ({"algorithm": {"learning_rate": float("nan")}}, r"algorithm\.learning_rate=nan"),
}


@pytest.mark.parametrize(("layer", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_key_value_and_what_is_allowed(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load([layer])


def test_every_mistake_is_told_at_once() -> None:
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
    assert f"# {sum(fields_of(settings).values()) - 1} advanced settings stand at their defaults" in short


def test_few_settings_are_shown_by_default() -> None:
    shown = [name for name, advanced in fields_of(Settings()).items() if not advanced]
    assert len(shown) <= 112


@pytest.mark.parametrize("key", ["learner.lease_ttl_s", "broker.session_timeout_s"])
def test_a_timeout_of_zero_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{key}=0: .*greater than 0"):
        load([parse_assignment(f"{key}=0")])


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().seed = 1


def test_secrets_are_not_printed() -> None:
    settings = load([{"security": {"redis_password": "hunter2"}}])
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.model_dump_json()


def test_the_name_chooses_the_section_wherever_it_is_said() -> None:
    assert isinstance(load([{"algorithm": {"batch_steps": 5}}]).algorithm, PPOSection)
    layers = [
        {"algorithm": {"batch_steps": 5}},
        from_environment({"PENSTOCK_ALGORITHM__NAME": "reinforce", "PENSTOCK_ALGORITHM__RHO_CLIP": "2"}),
        parse_assignment("algorithm.name=impala"),
    ]
    assert load(layers).algorithm == ImpalaSection(batch_steps=5, rho_clip=2.0)


def algorithms() -> dict[str, type[AlgorithmSection]]:
    """The section of every algorithm by its name, those of installed workloads too."""
    return {**SECTIONS, **algorithm_sections()}


@pytest.mark.parametrize("name", algorithms())
def test_the_settings_of_every_algorithm_read_back_equal(name: str) -> None:
    settings = load([{"algorithm": {"name": name}}])
    assert type(settings.algorithm) is algorithms()[name]
    assert load([settings.model_dump()]) == settings
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def sections() -> dict[str, type[BaseModel]]:
    """Every section of the configuration by name, those of the algorithms as algorithm.NAME."""
    annotated = {name: field.annotation for name, field in Settings.model_fields.items()}
    plain = {
        name: kind
        for name, kind in annotated.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    return plain | {f"algorithm.{name}": kind for name, kind in algorithms().items()}


def help_of(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field in the source.

    pydantic would read it too (`use_attribute_docstrings`), in every process at its start.
    """
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
def test_every_knob_has_a_line_of_help(name: str) -> None:
    section = sections()[name]
    assert {key for key in section.model_fields if not section.model_fields[key].description} <= help_of(
        section
    ).keys()


def test_the_number_of_knobs_is_bounded() -> None:
    limits = {"actor": 25, "broker": 25}
    for name, section in sections().items():
        assert len(section.model_fields) <= limits.get(name, 40), name


PPO_KNOBS = {
    "name": "choice", "discount": "per step", "batch_steps": "steps", "staleness": "updates",
    "stale_after": "updates", "mask_after": "updates", "epochs": "passes", "lagging_epochs": "passes",
    "minibatches": "gradient steps", "advantage": "choice", "gae_lambda": "per step", "objective": "choice",
    "rho_clip": "ratio", "c_clip": "ratio", "behaviour_weight_cap": "ratio", "clip_range": "ratio",
    "clip_schedule": "choice", "dual_clip": "ratio", "value_clip": "scaled return",
    "value_coefficient": "ratio", "entropy_coefficient": "per nat", "entropy_decay": "ratio",
    "entropy_floor": "per nat", "normalise_advantages": "yes or no", "scale_rewards": "yes or no",
    "learning_rate": "per gradient step", "learning_rate_schedule": "choice",
    "learning_rate_range": "per gradient step", "warmup_updates": "updates", "adam_epsilon": "gradient",
    "max_gradient_norm": "gradient", "target_kl": "nats", "adaptive_kl": "nats",
    "max_log_ratio": "nats",
}  # fmt: skip


def test_the_knobs_of_ppo_are_these() -> None:
    fields = PPOSection.model_fields
    assert fields.keys() == PPO_KNOBS.keys()
    assert len(fields) <= 40
    help_texts = help_of(PPOSection)
    for name, unit in PPO_KNOBS.items():
        help_ = help_texts[name]
        assert unit in help_.lower(), name
        assert "\n" not in help_, name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a floor above the start": (
        {"entropy_coefficient": 0.01, "entropy_decay": 0.9, "entropy_floor": 0.1},
        r"algorithm\.entropy_floor=0\.1: .*above entropy_coefficient=0\.01",
    ),
    "a decay that grows": (
        {"entropy_decay": 1.1},
        r"algorithm\.entropy_decay=1\.1: .*less than or equal to 1",
    ),
    "two schedules of the rate": (
        {"adaptive_kl": 0.01, "learning_rate_schedule": "linear"},
        r"algorithm\.adaptive_kl=0\.01: .*learning_rate_schedule=linear sets the rate, too",
    ),
    "a range upside down": (
        {"learning_rate_range": (1e-2, 1e-3)},
        r"algorithm\.learning_rate_range=.*lowest",
    ),
    "a dual clip within the range": ({"dual_clip": 1.0}, r"algorithm\.dual_clip=1\.0: .*greater than 1"),
}


@pytest.mark.parametrize(("section", "message"), WRONG.values(), ids=WRONG.keys())
def test_knobs_that_contradict_one_another_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load([{"algorithm": section}])
