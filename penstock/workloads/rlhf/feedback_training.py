"""Jobs that train an agent from its feedback: what they begin with, and what they leave.

    MODELS/PROJECT/AGENT/v15/    policy, reward_model, training_results.json; base_model where the run made it

The label is `v` and the number of ratings; the next version of as many is `v15.2`. What a training that uses
a reward model again leaves needs nothing of the older version's folder.
"""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

from penstock.config.run_folder import NoPlainFile, open_regular, opener, read_whole
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome, TrainedVersion, finite
from penstock.gateway.routes.feedback_routes import ratings_of
from penstock.registry.ratings import KeptRating, Rating
from penstock.registry.registry import Registry
from penstock.workloads.rlhf.artefacts import MANIFEST, RESULTS
from penstock.workloads.rlhf.preparation import BASE_MODEL, FEEDBACK, REWARD_MODEL

KIND: Final = "rlhf"
ASPECT: Final = "overall"
LEAST_RATINGS: Final = 10
LEAST_PROMPTS: Final = 2
REUSED: Final = "rewardModel"
REUSED_PLACE: Final = "rewardModelPath"
"""Facts of a job: the version whose reward model it uses, and where that lies; None: it trains one."""


class FeedbackTraining:
    """The kind of job; see `penstock.gateway.jobs.job_records.JobKind`."""

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return how much feedback there is, what it says, and how far it goes; raises ApiError 400.

        Pairs count as scores do, and have none: of pairs alone mean and deviation are None.
        """
        count, through, scores, prompts = 0, 0, list[float](), set[str]()
        for one in _used(registry, policy):
            count, through = count + 1, one.number
            if one.rating.score is not None:
                scores.append(one.rating.score)
            if len(prompts) < LEAST_PROMPTS:
                prompts.add(json.dumps(one.rating.prompt))
        if count < LEAST_RATINGS:
            told = f"{count} ratings: give at least {LEAST_RATINGS} before training"
            raise ApiError(400, told, error="insufficient")
        if len(prompts) < LEAST_PROMPTS:
            told = "all feedback is of one prompt: give some of others, by which the result is measured"
            raise ApiError(400, told, error="insufficient")
        return {
            "feedbackCount": count,
            "through": through,
            "scoreMean": fmean(scores) if scores else None,
            "scoreStd": pstdev(scores) if scores else None,
        }

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        """Write the feedback that there was when the job was asked for, and what it uses again."""
        file = folder / FEEDBACK
        with open(file, "w", opener=opener) as out:
            for one in _used(registry, policy):
                if one.number <= facts["through"]:
                    out.write(f"{json.dumps(_example(one.rating))}\n")
        said = {"feedback": str(file), "feedback_scale": "0:1"}
        reused = facts.get(REUSED_PLACE)
        if reused is not None:
            said |= _use_again(Path(reused), folder)
        return {"environment": {"kwargs": said}}

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """Export the models; returns where they lie and what they are worth. Raises OSError, ValueError."""
        summary = outcome.summary or {}
        label = _label(job.facts["feedbackCount"], taken)
        place = models / job.project / job.agent / label
        _export(folder, place)
        evaluation = summary.get("evaluation") or {}
        made = TrainedVersion(
            version=label,
            model_path=str(place / "policy"),
            reward_model_path=str(place / REWARD_MODEL),
            feedback_count=job.facts["feedbackCount"],
            reward_mean=finite(evaluation.get("mean")),
            reward_std=finite(evaluation.get("std")),
        )
        result = {
            "version": made.version,
            "modelPath": made.model_path,
            "rewardModelPath": made.reward_model_path,
            "feedbackCount": made.feedback_count,
            "trainingSteps": summary.get("updates"),
            "rewardMean": made.reward_mean,
            "rewardStd": made.reward_std,
        }
        return Conclusion(result=result, version=made)


def _used(registry: Registry, policy: str) -> Iterator[KeptRating]:
    """Yield scores and pairs of responses as a whole; other aspects are not of this training."""
    return (one for one in ratings_of(registry, policy) if one.rating.key == ASPECT)


def _example(rating: Rating) -> dict[str, Any]:
    if rating.rejected is not None:
        return {"prompt": rating.prompt, "chosen": rating.response, "rejected": rating.rejected}
    return {"prompt": rating.prompt, "response": rating.response, "score": rating.score}


def _label(count: int, taken: Collection[str]) -> str:
    """Return the first label of so many ratings that no version has."""
    labels = itertools.chain([f"v{count}"], (f"v{count}.{number}" for number in itertools.count(2)))
    return next(label for label in labels if label not in taken)


def _use_again(reward_model: Path, folder: Path) -> dict[str, str]:
    """Copy a version's reward model, and its base model, into a job's folder; return their settings."""
    own, base = folder.absolute() / REWARD_MODEL, folder.absolute() / BASE_MODEL
    its_base = reward_model.absolute().parent / BASE_MODEL
    for left in (own, base):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(reward_model, own)
    said = {"reward": str(own)}
    if its_base.is_dir():
        shutil.copytree(its_base, base)
        _name_base(own, str(its_base), base)
        said["model"] = str(base)
    return said


def _export(folder: Path, place: Path) -> None:
    """Copy what a job left; the folder appears whole, with all of it on the disk, or not at all.

    One of a gateway that was killed is made anew. What the run did not make, because it used another
    version's again, lies in the job's folder. Raises OSError, ValueError.
    """
    run = folder / "run"
    manifest = json.loads(read_whole(run / MANIFEST))
    policy = manifest["policy"]
    if policy is None:
        raise ValueError("the run has no final policy")
    if not isinstance(policy, str) or Path(policy).is_absolute() or ".." in Path(policy).parts:
        raise ValueError(f"{MANIFEST}: policy={policy!r}: is no folder of the run")
    temporary = place.with_name(f".{place.name}")
    for left in (temporary, place):
        shutil.rmtree(left, ignore_errors=True)
    try:
        _copy(folder, manifest, temporary, place)
        _sync(temporary)
        temporary.rename(place)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would take the room of the next one
        raise
    _sync_one(place.parent)


def _copy(folder: Path, manifest: dict[str, Any], temporary: Path, place: Path) -> None:
    """Copy what a job left to a folder that is `place` later; raises OSError."""
    run = folder / "run"
    temporary.mkdir(parents=True)
    _copy_folder(run / manifest["policy"], temporary / "policy")
    reward, base = (_made_or_reused(folder, name) for name in (REWARD_MODEL, BASE_MODEL))
    _copy_folder(reward, temporary / REWARD_MODEL)
    _copy_file(run / RESULTS, temporary / RESULTS)
    if base.is_dir():
        _copy_folder(base, temporary / BASE_MODEL)
        for model in ("policy", REWARD_MODEL, BASE_MODEL):
            _name_base(temporary / model, manifest["made_from"]["model"], (place / BASE_MODEL).absolute())


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder of a job, without checkpoints; raises OSError, also for a link in it."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        for name in names:
            if (file := Path(folder) / name).is_symlink():
                raise NoPlainFile(errno.ELOOP, file, "is a link, which no version has")
        return {"checkpoints"} & set(names)

    shutil.copytree(source, target, symlinks=True, ignore=left_out, copy_function=_copy_file)


def _copy_file(source: str | Path, target: str | Path) -> None:
    with open_regular(Path(source)) as read, Path(target).open("xb") as written:
        shutil.copyfileobj(read, written)
        os.fchmod(written.fileno(), os.fstat(read.fileno()).st_mode & 0o777)


def _sync(folder: Path) -> None:
    """Have a folder on the disk before anybody names it; what the disk refuses late, it refuses here."""
    for one in (*folder.rglob("*"), folder):
        _sync_one(one)


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _made_or_reused(folder: Path, name: str) -> Path:
    made = folder / "run" / name
    return made if made.is_dir() else folder / name


def _name_base(model: Path, old: str, new: Path) -> None:
    """Have a model name its base where it lies from now on, and not in another folder."""
    for file in model.glob("*.json"):
        file.write_text(file.read_text().replace(json.dumps(old), json.dumps(str(new))))
