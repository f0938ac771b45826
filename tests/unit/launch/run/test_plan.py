"""From a command line to a run."""

from pathlib import Path

import pytest

from penstock.config.run_folder import held_folder
from penstock.config.service_settings import learner_settings, service_settings
from penstock.config.settings import (
    ConfigurationError,
    ImpalaSection,
    LearnerSection,
    PPOSection,
    Settings,
    dump,
    load,
    parse_toml,
    shown,
)
from penstock.launch.commands.request import Request
from penstock.launch.run.plan import make_plan, prepare_folder
from penstock.learner.checkpoint.resume_options import ResumeOptions


def test_layers_lie_over_one_another_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'seed = 1\n[environment]\nid = "CartPole-v1"\n[algorithm]\nepochs = 7\nminibatches = 7\ndiscount '
        "= 0.7\n"
    )
    monkeypatch.setenv("PENSTOCK_ALGORITHM__EPOCHS", "8")
    monkeypatch.setenv("PENSTOCK_ALGORITHM__MINIBATCHES", "8")
    request = Request(what=str(file), seed=9, actors=3, assignments=("algorithm.minibatches=9",))
    settings = make_plan(request).settings
    assert isinstance(settings.algorithm, PPOSection)
    assert settings.algorithm.discount == 0.7
    assert settings.algorithm.name == "ppo"
    assert settings.algorithm.epochs == 8
    assert settings.algorithm.minibatches == 9
    assert (settings.seed, settings.actor.count) == (9, 3)
    assert settings.learner.total_steps == 150_000  # the workload's default for CartPole


@pytest.mark.parametrize("said", ["--set", "file", "environment"])
def test_defaults_of_one_algorithm_are_not_laid_under_another(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[environment]\nid = "CartPole-v1"\n')
    if said == "file":
        file.write_text(file.read_text() + '[algorithm]\nname = "impala"\n')
    if said == "environment":
        monkeypatch.setenv("PENSTOCK_ALGORITHM__NAME", "impala")
    assignments = ("algorithm.name=impala",) if said == "--set" else ()
    settings = make_plan(Request(what=str(file), assignments=assignments)).settings
    assert isinstance(settings.algorithm, ImpalaSection)
    assert settings.learner.total_steps == 300_000
    assert (settings.environment.count, settings.actor.unroll_length) == (16, 32)


@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
def test_the_configuration_of_every_algorithm_reads_back_equal(name: str, tmp_path: Path) -> None:
    settings = make_plan(Request(what="CartPole-v1", assignments=(f"algorithm.name={name}",))).settings
    assert f'name = "{name}"' in shown(settings, advanced=False)
    file = tmp_path / "config.toml"
    file.write_text(dump(settings))
    assert service_settings(file, ()) == settings


def test_lock_step_without_rollout_workers_is_refused(tmp_path: Path) -> None:
    said = ("algorithm.name=impala", "algorithm.staleness=0", "actor.count=0", "serving.listen=127.0.0.1:0")
    with pytest.raises(ConfigurationError, match=r"algorithm\.staleness=0: lock-step"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=said))


def test_a_run_that_learns_from_clients_waits_for_them_unless_it_is_told_how_long(tmp_path: Path) -> None:
    def limit(actors: int, *assignments: str) -> float:
        request = Request(
            what="CartPole-v1", actors=actors, serve_at="127.0.0.1:0", run_dir=tmp_path / "run",
            assignments=assignments,
        )  # fmt: skip
        return make_plan(request).settings.learner.stall_timeout_s

    assert limit(0) > 1e8
    assert limit(2) == LearnerSection().stall_timeout_s
    assert limit(0, "learner.stall_timeout_s=60") == 60


def test_a_run_is_its_name_and_a_random_suffix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (make_plan(Request(what="CartPole-v1")) for _ in range(2))
    assert first.settings.run != second.settings.run
    assert first.run_dir == tmp_path / "runs" / first.settings.run
    assert first.settings.run.startswith("cartpole-v1-")


def test_the_target_is_the_environments_own_unless_said(tmp_path: Path) -> None:
    assert make_plan(Request(what="Acrobot-v1", run_dir=tmp_path / "a")).target == -100.0
    assert make_plan(Request(what="Acrobot-v1", run_dir=tmp_path / "a", target_return=-90.0)).target == -90.0


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(what="CartPoel-v1"), "environment.id='CartPoel-v1'.*CartPole-v1"),
        (Request(what="CartPole-v1", assignments=("algorithm.epoch=3",)), "algorithm.epoch: unknown key"),
        (Request(what="CartPole-v1", assignments=("algorithm.epochs=0",)), "algorithm.epochs=0"),
        (Request(what="CartPole-v1", assignments=("epochs",)), "write section.key=value"),
        (Request(what="nowhere.toml"), "nowhere.toml"),
        (Request(), "name a Gymnasium environment"),
        (Request(resumption=ResumeOptions(resume=True)), "--resume: name the run's folder"),
        (Request(what="CartPole-v1", assignments=("workload=chess",)), "workload='chess'"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(request_: Request, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_plan(request_)


def test_a_resumed_run_takes_settings_of_its_own_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[environment]\nid = "CartPole-v1"\n[algorithm]\nname = "impala"\n')
    prepare_folder(make_plan(Request(what=str(file), run_dir=tmp_path / "r")))
    ask = Request(
        what=str(tmp_path / "r"),
        resumption=ResumeOptions(resume=True),
        assignments=("algorithm.rho_clip=0.5",),
    )
    settings = make_plan(ask).settings
    assert isinstance(settings.algorithm, ImpalaSection)
    assert settings.algorithm.rho_clip == 0.5


def test_only_resume_reuses_a_run(tmp_path: Path) -> None:
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", seed=5))
    prepare_folder(plan)
    with pytest.raises(ConfigurationError, match="holds a run already; add --resume"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r"))
    resumed = make_plan(Request(what=str(tmp_path / "r"), resumption=ResumeOptions(resume=True)))
    assert resumed.settings == plan.settings
    assert resumed.resumption.resume
    with pytest.raises(ConfigurationError, match=r"holds no config\.toml"):
        make_plan(Request(run_dir=tmp_path / "other", resumption=ResumeOptions(resume=True)))


def test_the_module_of_a_named_environment_may_be_imported_by_its_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_environments.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', reward_threshold=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = make_plan(Request(what="my_environments:Mine-v0", run_dir=tmp_path / "r"))
    assert plan.settings.actor.allow_modules == ("my_environments",)
    assert plan.settings.run.startswith("mine-v0-")
    assert plan.target == 7


def test_the_module_of_a_named_network_may_be_imported_by_its_actors(tmp_path: Path) -> None:
    ask = ("policy.network=absent_networks:Mine", 'actor.allow_modules=["other"]')
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=ask))
    assert plan.settings.actor.allow_modules == ("other", "absent_networks")


def test_who_serves_a_run_may_import_what_its_configuration_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("policy.network=absent_networks:Mine", "serving.max_wait_ms=3", "metrics.port=9000")
    prepare_folder(make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=ask)))
    monkeypatch.setenv("PENSTOCK_SERVING__MAX_DELAY_MS", "70")
    served = service_settings(None, ("serving.max_wait_ms=4",), run_dir=tmp_path / "r")
    assert served.actor.allow_modules == ("absent_networks",)
    assert (served.serving.max_wait_ms, served.serving.max_delay_ms) == (4, 70)
    assert (served.run.startswith("cartpole-v1-"), served.metrics.port) == (True, 0)
    assert service_settings(
        None, ('actor.allow_modules=["other"]',), run_dir=tmp_path / "r"
    ).actor.allow_modules == ("other",)
    assert service_settings(None, (), run_dir=tmp_path).actor.allow_modules == ()


def test_wrappers_of_rewards_are_kept_in_the_runs_file_and_their_modules_allowed(tmp_path: Path) -> None:
    asked = 'environment.reward=[{clip = [-1, 1.5]}, {shape = "math:fabs"}, {scale = 0.1}]'
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "r", assignments=(asked,)))
    assert plan.settings.actor.allow_modules == ("math",)
    assert [one.model_dump(exclude_none=True) for one in plan.settings.environment.reward] == [
        {"clip": (-1.0, 1.5)}, {"shape": "math:fabs"}, {"scale": 0.1},
    ]  # fmt: skip
    prepare_folder(plan)
    assert (
        make_plan(Request(what=str(tmp_path / "r"), resumption=ResumeOptions(resume=True))).settings
        == plan.settings
    )


def test_the_written_configuration_reads_back_equal_and_holds_no_secret(tmp_path: Path) -> None:
    settings = load([
        {
            "environment": {"kwargs": {"name": 'a "quoted" ü', "nested": {"deep": [1, 2.5, True]}}},
            "policy": {"hidden_sizes": [32, 16]},
            "algorithm": {"learning_rate": 1e-12},
            "security": {"redis_password": "hunter2", "tls_key": "/certs/key.pem"},
        }
    ])  # fmt: skip
    file = tmp_path / "config.toml"
    file.write_text(dump(settings))
    assert "hunter2" not in file.read_text()
    assert "hunter2" not in shown(settings, advanced=False)
    assert 'redis_password = "****' in shown(settings, advanced=False)
    without = settings.security.model_copy(update={"redis_password": None})
    assert load([parse_toml(file)]) == settings.model_copy(update={"security": without})


def test_a_service_reads_file_environment_and_assignments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service_settings(None, ()) == Settings()
    file = tmp_path / "config.toml"
    file.write_text("[broker]\nredis_wait_s = 1\nmax_log_entries = 1\n[metrics]\nport = 1\n")
    monkeypatch.setenv("PENSTOCK_BROKER__MAX_LOG_ENTRIES", "2")
    monkeypatch.setenv("PENSTOCK_METRICS__PORT", "2")
    settings = service_settings(file, ("metrics.port=3",))
    assert settings.broker.redis_wait_s == 1
    assert settings.broker.max_log_entries == 2
    assert settings.metrics.port == 3


def test_a_password_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match=r"redis_password=\*+: ") as caught:
        load([{"security": {"redis_password": ["hunter2"]}}])
    assert "hunter2" not in str(caught.value)


def test_two_launchers_never_have_one_run_in_hand(tmp_path: Path) -> None:
    with (
        held_folder(tmp_path / "run"),
        pytest.raises(ConfigurationError, match=r"run_dir=.*another `penstock train`"),
        held_folder(tmp_path / "run"),
    ):
        pass
    with held_folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("environment_id", ["CartPole-v1", "LunarLander-v3"])
def test_a_learner_on_its_own_learns_as_under_train(tmp_path: Path, environment_id: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'run = "far"\n[environment]\nid = "{environment_id}"\n[algorithm]\nepochs = 3\n')
    alone = learner_settings(file, ("seed=7",))
    plan = make_plan(Request(what=str(file), run_dir=tmp_path / "r", seed=7))
    assert alone == plan.settings.model_copy(update={"run": "far"})
    assert alone.learner.total_steps is not None
    prepare_folder(plan)
    assert learner_settings(plan.config, ()) == plan.settings


def test_a_recipe_at_its_former_place_is_named_with_its_new_one() -> None:
    with pytest.raises(ConfigurationError, match=r"recipes/goals.toml: .* in penstock/recipes/goals.toml$"):
        make_plan(Request(what="recipes/goals.toml"))
