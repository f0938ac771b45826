"""The loop: it runs the steps of a round in order, round after round, until it is asked to end.

    waiting   for enough new ratings that count; the newest of them is recorded
    ratings   writes believed.jsonl and prompts.jsonl of the round
    reward    `penstock rlhf reward train`; a model no better than chance ends the round
    training  `penstock train`, from the version that answers; it registers its last version, and the round
              ends where its evaluation does not find that better
    trial     that version is the canary: servers withdraw a worse one, the loop promotes a better one

Each step first reads what exists of its results, so that a repeated step does only what is left. Texts that
people wrote stay in the folder of a round only while the round lasts.
"""

import contextlib
import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.run_folder import make_private
from penstock.config.settings import (
    ActorSection,
    LearnerSection,
    RegistrySection,
    ServingSection,
    Settings,
    dump,
)
from penstock.registry.canary import Verdict
from penstock.registry.records import NotAllowed, PolicyVersion, RegistryError, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import Fatal
from penstock.runtime.output_file import replace_file
from penstock.workloads.chat import loop_state
from penstock.workloads.chat import step_process as steps
from penstock.workloads.chat.loop_state import Abandonment, LoopOrder, LoopState, Outcome, Step
from penstock.workloads.chat.step_process import ServedJudge, ServedRun, StepFailed, StepInterrupted
from penstock.workloads.language.feedback import write_rows

# ---- The training of a round, as a recipe for `penstock train`.

TOKENS: Final = 20_000
"""Tokens of answers that a round trains on by default."""
_RESPONSES: Final = 16
_BATCH_TOKENS: Final = 1024
_KEPT: Final = ("model", "response_tokens", "held_out", "device", "true_reward")


def run_name(run: ServedRun, number: int) -> str:
    return f"{run.settings.run}-round-{number}"


def recipe_of(run: ServedRun, folder: Path, number: int) -> str:
    """Return the recipe of a round, as TOML. folder: of the round, absolute. number: of the round."""
    given = run.settings
    kwargs: dict[str, Any] = {
        name: given.environment.kwargs[name] for name in _KEPT if name in given.environment.kwargs
    }
    kwargs |= {"prompts": str(folder / steps.PROMPTS), "reward": str(folder / steps.JUDGE)}
    policy = {**given.policy.kwargs, "begin_with": str(folder / steps.BEGIN)}
    registry = RegistrySection(
        url=registry_url(run.folder, given.registry.url),
        password_file=given.registry.password_file,
        activate_first=False,
    )
    settings = Settings(
        workload=given.workload,
        run=run_name(run, number),
        seed=given.seed + number,
        environment=given.environment.model_copy(update={"count": _RESPONSES, "kwargs": kwargs}),
        policy=given.policy.model_copy(update={"kwargs": policy}),
        algorithm=given.algorithm.model_copy(update={"batch_steps": _batch_tokens(given)}),
        actor=ActorSection(count=1, unroll_length=given.actor.unroll_length),
        learner=LearnerSection(
            total_steps=TOKENS,
            stop_at_target=False,
            device=given.learner.device,
            precision=given.learner.precision,
            threads=given.learner.threads,
        ),
        evaluation=given.evaluation,
        registry=registry,
        serving=ServingSection(policy=run.policy),
    )
    return dump(settings)


def _batch_tokens(given: Settings) -> int:
    """Return the tokens of an update, enough that outstanding experience holds a whole fragment."""
    charge = given.actor.unroll_length * _RESPONSES
    return max(_BATCH_TOKENS, given.algorithm.update_steps, -(-charge // 2))


log = logging.getLogger(__name__)

BY: Final = "loop"
LOOK_S: Final = 1.0
WAITS_S: Final = (60.0, 600.0)
"""Seconds between tries of a failed step; after the last try an operator has to resume the loop."""
_UNPROVED: Final = "nothing was proved"


class LearningLoop:
    """The loop of a run; one process at a time runs it. waits_s: seconds between tries of a step."""

    def __init__(
        self,
        run: ServedRun,
        order: LoopOrder,
        draining: threading.Event,
        *,
        once: bool = False,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        self._waits_s = waits_s
        self._run, self._order, self._draining, self._once = run, order, draining, once
        self._folder = loop_state.folder_of(run.folder)
        self._state = LoopState()
        self._new: loop_state.NewRatings | None = None
        """Ratings after the last round or, during a trial, since its beginning."""
        self._seen = 0
        """Their number when they were last filtered."""

    def go(self) -> None:
        """Run until draining or, with `once`, until one round is over; raises Fatal where that fails."""
        with (
            self._held(),
            Registry.open(self._run.url, migrate=True) as registry,
            ServedJudge(self._folder) as judge,
        ):
            self._state = replace(loop_state.read_state(self._folder), order=self._order.shown())
            if self._state.step is Step.WAITING:
                self._state = replace(self._state, labels=0)  # they are counted again
                steps.forget_texts(self._round)  # left by a loop that was killed at this point
            loop_state.write_state(self._folder, self._state)
            ended = len(self._state.past)
            while not self._draining.is_set():
                judge.look()
                if not self._advance(registry):
                    self._draining.wait(LOOK_S)
                if self._once and len(self._state.past) > ended:
                    return

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        make_private(self._folder)
        with (self._folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    f"{self._folder}: another loop runs on this run; stop it first"
                ) from None
            yield

    def _advance(self, registry: Registry) -> bool:
        """Take the next action; returns False where the loop can only wait."""
        asked = loop_state.read_abandonment(self._folder)
        if asked is None and loop_state.read_pause(self._folder) is not None:
            return False
        steps: Mapping[Step, Callable[[Registry], bool]] = {
            Step.WAITING: self._await_labels,
            Step.RATINGS: self._select_ratings,
            Step.REWARD: self._train_reward,
            Step.TRAINING: self._train_policy,
            Step.TRIAL: self._try_canary,
        }
        try:
            if asked is not None:
                return self._abandon(registry, asked)
            if self._state.failure:
                self._try_again(registry)
            return steps[self._state.step](registry)
        except StepInterrupted:
            return False
        except (StepFailed, ConfigurationError, OSError) as error:
            self._to(failure=str(error), tries=self._state.tries + 1)
            if self._once:
                raise Fatal(str(error)) from error
            self._await_next_try(str(error))
        except RegistryError as error:
            self._note(f"the registry: {error}")
        return False

    def _await_next_try(self, why: str) -> None:
        """Pause before the next try, longer each time; after the last try until an operator resumes."""
        step, tries = self._state.step, self._state.tries
        log.warning("a step failed", extra={"step": step.value, "why": why, "tries": tries})
        wait_s = self._waits_s[tries - 1] if tries <= len(self._waits_s) else None
        until_s = None if wait_s is None else time.time() + wait_s
        loop_state.pause(self._folder, f"{step} failed: {why}"[:1000], BY, until_s)

    def _try_again(self, registry: Registry) -> None:
        """Prepare another try of a failed step, after its pause or when an operator resumed the loop.

        A reward model also takes the ratings since then: too few ratings would make every try fail.
        """
        if self._state.tries > len(self._waits_s):
            self._to(tries=0)
        if self._state.step is not Step.REWARD:
            self._to(failure="")
            return
        new = loop_state.NewRatings(self._run.policy, self._state.through)
        new.look(registry)
        self._to(failure="", step=Step.RATINGS, through=new.newest)

    def _abandon(self, registry: Registry, asked: Abandonment) -> bool:
        """Abandon the requested round if it is the current one."""
        if asked.number == self._state.number and self._state.step is not Step.WAITING:
            if self._state.version is not None:
                self._withdraw(registry, self._state.version, asked.reason, asked.by)
            pause = loop_state.read_pause(self._folder)
            if pause is not None and pause.by == BY:
                loop_state.resume(self._folder)  # the pause was for a step of this round
            self._end(Outcome.ABANDONED, f"by {asked.by}: {asked.reason}")
        loop_state.forget_abandonment(self._folder)
        return True

    def _withdraw(self, registry: Registry, version: int, reason: str, by: str) -> None:
        """Withdraw the version of a round unless it was decided on already."""
        match registry.get(self._run.policy, version).status:
            case Status.CANARY:
                registry.rollback(self._run.policy, reason, by=by, version=version)
            case Status.CANDIDATE:
                registry.retire(self._run.policy, version, reason, by=by)

    # ------------------------------------------------------------ the steps

    def _await_labels(self, registry: Registry) -> bool:
        new, wanted = self._new_behind(self._state.taken), self._order.labels
        count = new.look(registry)
        if count > self._seen and self._state.labels + count - self._seen >= wanted:
            kept = loop_state.believed(registry, self._run.policy, new.newest)
            self._seen = count
            self._to(labels=loop_state.new_among(kept, self._state.taken))
        if self._state.labels < wanted:
            return False
        if steps.serving_version(registry, self._run.policy, by=BY) is None:
            self._note(
                "no version is registered: a run that serves registers the one that it begins with where "
                "learner.keep_every_updates is set"
            )
            return False
        self._to(number=self._state.number + 1, step=Step.RATINGS, through=new.newest, note="")
        self._new = None
        return True

    def _select_ratings(self, registry: Registry) -> bool:
        rows = loop_state.believed(registry, self._run.policy, self._state.through)
        given = str(self._run.settings.environment.kwargs.get("prompts", ""))
        write_rows(self._round / steps.PROMPTS, loop_state.replayed_prompts(rows, given))
        write_rows(self._round / steps.BELIEVED, loop_state.with_members(rows))
        self._to(step=Step.REWARD, labels=loop_state.new_among(rows, self._state.taken))
        return True

    def _train_reward(self, registry: Registry) -> bool:
        del registry
        judge = self._round / steps.JUDGE
        if not (judge / steps.CARD).exists():
            heads = self._order.heads or steps.rated_heads(self._round / steps.BELIEVED)
            changed = loop_state.read_head_weights(self._folder).standing
            words = ("rlhf", "reward", "train", steps.BELIEVED, "--model", self._run.model)
            options = ("--out", steps.JUDGE, "--json", *self._order.reward_words(heads, changed))
            steps.run_step((*words, *options), self._round, self._must_stop)
        self._to(judge={"round": self._state.number, **steps.facts_of(judge / steps.CARD)})
        auc, tells = steps.told_apart(judge / steps.CARD)
        least = self._order.least_auc
        if least and (tells is None or tells < least):
            found = "nothing, for these are all equal" if tells is None else f"{tells:.2f}"
            why = f"on held-out ratings the reward model reaches {found}; at least {least:g} is wanted"
            self._end(Outcome.UNLEARNED, why)
        else:
            steps.keep_judge(self._folder, judge)
            self._to(step=Step.TRAINING, auc=auc, tries=0)
        return True

    def _train_policy(self, registry: Registry) -> bool:
        if not (self._round / steps.BEGIN).exists():
            base = steps.serving_version(registry, self._run.policy, by=BY)
            if base is None:
                raise StepFailed("no version is active: promote one")
            try:
                blob = self._run.weights(base)
            except ValueError as error:
                raise StepFailed(str(error)) from error
            self._to(base=base.version)
            replace_file(self._round / steps.BEGIN, blob)
        run = self._round / steps.RUN
        if steps.summary_of(run) is None:
            steps.run_step(self._training(run), self._round, self._must_stop)
        made = self._made(registry)
        if made is None:
            raise StepFailed(f"{run}: the training registered no version; its logs say why")
        if (why := steps.not_better(run)) and not self._order.any_version:
            self._to(version=made.version)
            self._withdraw(registry, made.version, why, BY)
            self._end(Outcome.UNPROVED, why)
            return True
        new = loop_state.NewRatings(self._run.policy, self._state.through)
        new.look(registry)
        self._to(step=Step.TRIAL, version=made.version, trial_from=new.newest, tries=0)
        return True

    def _training(self, run: Path) -> list[str]:
        said = ["--json", *(f"--set={one}" for one in self._order.train)]
        if steps.has_checkpoint(run):
            return ["train", steps.RUN, "--resume", *said]
        shutil.rmtree(run, ignore_errors=True)  # it has no checkpoint
        replace_file(
            self._round / steps.RECIPE, recipe_of(self._run, self._round, self._state.number).encode()
        )
        return ["train", steps.RECIPE, "--run-dir", steps.RUN, *said]

    def _try_canary(self, registry: Registry) -> bool:
        assert self._state.version is not None
        version = registry.get(self._run.policy, self._state.version)
        match version.status:
            case Status.CANDIDATE:
                return self._begin_trial(registry, version)
            case Status.CANARY:
                return self._judge(registry, version)
            case Status.ACTIVE:
                self._end(Outcome.PROMOTED, version.reason)
            case Status.RETIRED if version.standby:
                self._end(Outcome.PROMOTED, version.reason)  # and later replaced
            case Status.ROLLED_BACK | Status.RETIRED:
                unproved = version.reason.startswith(_UNPROVED)
                self._end(Outcome.UNPROVED if unproved else Outcome.WITHDRAWN, version.reason)
        return True

    def _begin_trial(self, registry: Registry, version: PolicyVersion) -> bool:
        reason = f"round {self._state.number} of the loop: {self._state.labels} new labels"
        try:
            registry.promote(
                self._run.policy,
                version.version,
                reason,
                by=BY,
                to=Status.CANARY,
                canary_share=self._order.share,
            )
        except NotAllowed as error:
            self._note(f"the canary of this round waits: {error}")
            return False
        self._note("")
        return True

    def _judge(self, registry: Registry, version: PolicyVersion) -> bool:
        trial, state = registry.trial(self._run.policy)
        if state is not None and state.verdict is Verdict.BETTER:
            registry.promote(self._run.policy, version.version, state.explain(), by=BY)
            return True
        self._note("" if trial is not None else "no client has the active version, so nothing is compared")
        since = self._new_behind(self._state.trial_from).look(registry)
        if since < self._order.patience:
            return False
        reason = f"{_UNPROVED} after {since} further ratings" + (
            "" if state is None else f": {state.explain()}"
        )
        registry.rollback(self._run.policy, reason[:1000], by=BY, version=version.version)
        return True

    # ------------------------------------------------------------ shared parts of the steps

    @property
    def _round(self) -> Path:
        return loop_state.round_folder(self._folder, self._state.number)

    def _new_behind(self, after: int) -> loop_state.NewRatings:
        if self._new is None:
            self._new, self._seen = loop_state.NewRatings(self._run.policy, after), 0
        return self._new

    def _to(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        loop_state.write_state(self._folder, self._state)

    def _note(self, text: str) -> None:
        if text != self._state.note:
            self._to(note=text)

    def _end(self, outcome: Outcome, why: str) -> None:
        self._state, self._new = self._state.ended(outcome, why), None
        loop_state.write_state(self._folder, self._state)
        steps.forget_texts(self._round)
        log.info("round over", extra={"round": self._state.number, "outcome": outcome.value, "why": why})

    def _must_stop(self, seconds: float) -> bool:
        return (
            self._draining.wait(seconds)
            or loop_state.read_pause(self._folder) is not None
            or loop_state.read_abandonment(self._folder) is not None
        )

    def _made(self, registry: Registry) -> PolicyVersion | None:
        summary = steps.summary_of(self._round / steps.RUN) or {}
        own = [one for one in registry.list(self._run.policy) if one.run == summary.get("run")]
        return own[-1] if own else None
