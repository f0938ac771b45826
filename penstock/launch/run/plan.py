"""From a command line to what a run will do: resolved settings and the run's folder.

Layers, each over the one before: the workload's defaults for environment and algorithm, the TOML file,
the process environment, the flags, `--set`. Every mistake is a ConfigurationError that names the key.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.actor.acting.masks import potentials
from penstock.config import settings as configuration
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import over_defaults
from penstock.config.settings import ConfigurationError, Progress, Settings, dump
from penstock.config.trusted import check_own, module_of, seal
from penstock.config.workload import find, load
from penstock.launch.commands.request import Request
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.feed.recording import DESCRIPTION
from penstock.learner.ledger import check_same, sections
from penstock.protocol.limits import new_run_name
from penstock.runtime.lifecycle import Lifecycle

# ---- Checks whether a run can be resumed with other settings, before anything is written.


def check_resumable(run_dir: Path, settings: Settings) -> None:
    """Raise ConfigurationError that names a setting which must stay since the newest checkpoint and changes.

    A run without a readable checkpoint may change every setting: the learner starts it anew, or refuses.
    """
    begun = _newest_state(run_dir)
    if begun is None:
        return
    name, before = begun.get("run"), begun.get("sections")
    if isinstance(name, str) and settings.run != name:
        raise ConfigurationError(
            f"run={settings.run!r}: {run_dir} holds run {name!r}, whose name stays; leave it out"
        )
    if isinstance(before, dict):
        check_same(settings.run, before, sections(settings))


def _newest_state(run_dir: Path) -> dict[str, Any] | None:
    """Return the state in the newest checkpoint that can be read; ids sort by age."""
    for file in sorted(run_dir.glob("checkpoints/[!.]*/state.json"), reverse=True):
        try:
            state = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            return state
    return None


_NEXT_CONFIG_FILE = "config.next.toml"
_NEVER_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can be started. target: mean return that counts as solved, None for no such value."""

    settings: Settings
    run_dir: Path
    resumption: ResumeOptions
    target: float | None

    @property
    def config(self) -> Path:
        return self.run_dir / CONFIG_FILE

    @property
    def next_config(self) -> Path:
        """File of the other settings that a run is resumed with, until the learner has accepted them."""
        return self.run_dir / _NEXT_CONFIG_FILE

    @property
    def service_config(self) -> Path:
        return self.next_config if self.next_config.exists() else self.config


def make_plan(request: Request) -> Plan:
    """Resolve a request; writes nothing. Raises ConfigurationError for what does not fit."""
    if request.resumption.best and not request.resumption.resume:
        raise ConfigurationError("--best: resumes from the best checkpoint; add --resume")
    if request.resumption.resume:
        run_dir = _resumed_folder(request)
        written = configuration.parse_toml(run_dir / CONFIG_FILE)
        recipe = _recipe_layer(run_dir, written, request)
        _check_algorithm(written, recipe, request)
        settings = resolve(configuration.merge(written, recipe), request)
        if not request.trust:
            check_own(run_dir, configuration.load([written]), _newly_allowed(request))
    else:
        settings = resolve(_first_layer(request.what), request)
        name = new_run_name(settings.run or settings.environment.id.rpartition(":")[2])
        settings = _with_derived(settings).model_copy(update={"run": name})
        if request.recording is not None:
            if not (request.recording / DESCRIPTION).is_file():
                raise ConfigurationError(
                    f"--from {request.recording}: holds no {DESCRIPTION}, so no recording"
                )
            # There are no actors, and no recording of its own.
            source = {"feed_from": request.recording.absolute(), "record": None}
            settings = changed(settings, actor={"count": 0}, learner=source)
        run_dir = request.run_dir or Path("runs") / name
        if (run_dir / CONFIG_FILE).exists():
            raise ConfigurationError(
                f"--run-dir {run_dir}: holds a run already; add --resume or choose another"
            )
        run_dir = run_dir.resolve()
    # Later readers start in other folders.
    journal, record = settings.actor.ack_journal, settings.learner.record
    settings = changed(
        settings,
        actor={"ack_journal": journal and journal.absolute()},
        learner={"record": record and record.absolute()},
    )
    _check_actors(settings)
    if request.resumption.resume:
        check_resumable(run_dir, settings)
    target = settings.learner.target_return
    known = load(find(settings.workload).target)(settings.environment)
    return Plan(
        settings=settings,
        run_dir=run_dir,
        resumption=request.resumption if request.resumption.resume else ResumeOptions(),
        target=known if target is None else target,
    )


def _newly_allowed(request: Request) -> tuple[str, ...]:
    """Return `actor.allow_modules` of the environment and the command line, without the run's own."""
    layers = [configuration.from_environment(), *map(configuration.parse_assignment, request.assignments)]
    # Other settings may need the run's own layer: those of its algorithm would be unknown.
    actor = [{"actor": layer["actor"]} for layer in layers if "actor" in layer]
    return configuration.load(actor).actor.allow_modules


def changed(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    made = {name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()}
    return settings.model_copy(update=made)


def _with_derived(settings: Settings) -> Settings:
    """Return the settings of a new run with those that follow from others where the user sets none."""
    actor, registry, learner = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    # Actors started here may import what the user names here for environment, rewards and network.
    names = (settings.environment.id, settings.policy.network, *potentials(settings.environment))
    allowed = settings.actor.allow_modules
    new = sorted({module_of(name) for name in names} - {"", *allowed})
    if new:
        actor["allow_modules"] = (*allowed, *new)
    if settings.serving.listen:
        # Clients of a run that learns from them stay on its newest weights.
        if "activate_first" not in settings.registry.model_fields_set:
            registry["activate_first"] = False
        # Clients may stay away as long as they like: actors may not.
        if not settings.actor.count and "stall_timeout_s" not in settings.learner.model_fields_set:
            learner["stall_timeout_s"] = _NEVER_S
    return changed(settings, actor=actor, registry=registry, learner=learner)


def _check_actors(settings: Settings) -> None:
    if settings.learner.feed_from is not None:
        return
    if settings.actor.count == 0 and not settings.serving.listen:
        raise ConfigurationError(
            "actor.count=0: no actor would act; say --actors N, or --serve ADDRESS for clients that do"
        )
    if settings.actor.count == 0 and settings.algorithm.lock_step:
        raise ConfigurationError(
            "algorithm.staleness=0: lock-step waits for rollout workers, and actor.count=0 starts none; "
            "say --set algorithm.staleness=1"
        )


def resolve(first: Mapping[str, Any], request: Request) -> Settings:
    """Lay environment, flags and assignments over `first`, and all of it over the workload's defaults."""
    layers = [first, configuration.from_environment(), request.layer()]
    layers += [configuration.parse_assignment(text) for text in request.assignments]
    return over_defaults(layers)


def make_folders(plan: Plan) -> None:
    (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (plan.run_dir / "endpoints").mkdir(exist_ok=True)


def prepare_folder(plan: Plan) -> None:
    """Make the run's folder and the configuration that its services start from.

    The configuration of a resumed run stays as it is: other settings are in `next_config` until
    `take_configuration`, because the learner may refuse them.
    """
    make_folders(plan)
    text = dump(plan.settings)
    plan.next_config.unlink(missing_ok=True)
    if not plan.config.exists():
        replace_text(plan.config, text)
    elif plan.config.read_text() != text:
        replace_text(plan.next_config, text)
    if not plan.next_config.exists():
        seal(plan.run_dir, plan.settings)


def take_configuration(plan: Plan) -> None:
    """Make the settings that the learner has accepted the configuration of the run."""
    if plan.next_config.exists():
        replace_text(plan.config, plan.next_config.read_text())
        seal(plan.run_dir, plan.settings)


def replace_text(file: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part."""
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _first_layer(what: str | None) -> dict[str, Any]:
    if what is None:
        raise ConfigurationError("train: name a Gymnasium environment such as CartPole-v1, or a .toml file")
    if what.endswith(".toml"):
        if what.startswith("recipes/") and not Path(what).exists():
            raise ConfigurationError(f"{what}: no such file; the recipes are in penstock/{what}")
        return configuration.parse_toml(Path(what))
    return {"environment": {"id": what}}


def _resumed_folder(request: Request) -> Path:
    named = request.run_dir or (Path(request.what) if request.what else None)
    if named is None:
        raise ConfigurationError("--resume: name the run's folder, as in `penstock train --resume runs/NAME`")
    if not (named / CONFIG_FILE).is_file():
        raise ConfigurationError(f"--resume {named}: holds no {CONFIG_FILE}, so no run; see `ls runs`")
    return named.resolve()


def _recipe_layer(run_dir: Path, written: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the settings of a recipe that is named in addition to the run to resume; {} without one.

    Raises ConfigurationError for another run's folder or environment.
    """
    what = request.what
    if what is None or Path(what).resolve() == run_dir:
        return {}
    layer = _first_layer(what)
    configuration.load([layer])
    # The run's name has got a random suffix since, and its file what its actors may import besides.
    layer.pop("run", None)
    actor = layer.get("actor", {})
    if "allow_modules" in actor:
        allowed = written.get("actor", {}).get("allow_modules", ())
        layer["actor"] = actor | {"allow_modules": list(dict.fromkeys((*allowed, *actor["allow_modules"])))}
    own = written.get("environment", {}).get("id")
    named = layer.get("environment", {}).get("id", own)
    if named != own:
        raise ConfigurationError(
            f"--resume {run_dir}: that run is of environment.id={own!r}, not {named}; leave {what} out, or "
            "start another run without --resume"
        )
    return layer


def _check_algorithm(written: Mapping[str, Any], recipe: Mapping[str, Any], request: Request) -> None:
    """Raise ConfigurationError where another algorithm is named, which does not know the run's settings."""
    assigned = map(configuration.parse_assignment, request.assignments)
    began = written.get("algorithm", {}).get("name")
    for layer in (recipe, configuration.from_environment(), *assigned):
        section = layer.get("algorithm")
        name = section.get("name", began) if isinstance(section, Mapping) else began
        if name != began:
            raise ConfigurationError(
                f"algorithm.name={name!r}: the run began with {began!r}, which stays; start another run"
            )


def prepared(plan: Plan, lifecycle: Lifecycle, say: Callable[[str], None]) -> Plan:
    """The plan with everything made; raises ConfigurationError, Interrupted when the process drains first."""
    path = find(plan.settings.workload).prepare
    if not path:
        return plan
    progress = Progress(say, lifecycle.draining)
    return replace(plan, settings=load(path)(plan.settings, plan.run_dir, progress))
