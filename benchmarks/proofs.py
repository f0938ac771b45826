"""The learning proofs: which task each algorithm must solve, from which seeds, within how many steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One run of `penstock train` that must end with an evaluation of at least `threshold`.

    at_most: instead, what the evaluation must not exceed: the run shows what cannot be learned.
    variant: what differs from the plain run of that task, "" for nothing. options: further arguments.
    """

    task: str
    algorithm: str
    seed: int
    threshold: float
    total_steps: int
    variant: str = ""
    options: tuple[str, ...] = ()
    at_most: float | None = None

    def passes(self, evaluation: float | None) -> bool:
        """Whether a mean return, None for no evaluation, is what must come of it."""
        if evaluation is None:
            return False
        return evaluation >= self.threshold if self.at_most is None else evaluation <= self.at_most

    @property
    def wanted(self) -> str:
        """The bound, for people."""
        return f"≥ {self.threshold:g}" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes two records the same entry."""
        return self.task, self.algorithm, self.variant, self.seed

    @property
    def title(self) -> str:
        """Task and variant, for people."""
        name = self.task.rpartition(":")[2]
        return f"{name}, {self.variant}" if self.variant else name

    def arguments(self) -> tuple[str, ...]:
        """Arguments behind `penstock`, without the folder of the run."""
        return (
            "train",
            self.task,
            "--seed",
            str(self.seed),
            "--target-return",
            f"{self.threshold:g}",
            "--total-steps",
            str(self.total_steps),
            *self.options,
            "--json",
        )


SEEDS = (1, 2, 3, 4, 5)


def _task(task: str, threshold: float, total_steps: int, seeds: tuple[int, ...] = SEEDS) -> list[Proof]:
    return [
        Proof(task=task, algorithm="ppo", seed=seed, threshold=threshold, total_steps=total_steps)
        for seed in seeds
    ]


def _actors() -> list[Proof]:
    return [
        Proof(
            task="CartPole-v1",
            algorithm="ppo",
            variant="1 actor" if actors == 1 else f"{actors} actors",
            seed=seed,
            threshold=475,
            total_steps=150_000,
            options=("--actors", str(actors)),
        )
        for actors in (1, 8)
        for seed in SEEDS
    ]


TASKS = "workloads.control.tasks"


def _without(
    task: str, threshold: float, at_most: float, total_steps: int, missing: str, knob: str
) -> list[Proof]:
    """The same task without what it needs, which must not be learned."""
    return [
        Proof(
            task=f"{TASKS}:{task}",
            algorithm="ppo",
            variant=f"without {missing}",
            seed=seed,
            threshold=threshold,
            at_most=at_most,
            total_steps=total_steps,
            options=("--set", knob),
        )
        for seed in SEEDS
    ]


PROOFS: tuple[Proof, ...] = (
    *_task("CartPole-v1", 475, 150_000),
    *_actors(),
    *_task("Acrobot-v1", -100, 500_000),
    *_task("Pendulum-v1", -250, 500_000),
    *_task("LunarLander-v3", 200, 1_500_000),
    *_task("HalfCheetah-v5", 1_500, 1_000_000, seeds=(1,)),
    *_task(f"{TASKS}:Recall-v0", 0.95, 300_000),
    # A quarter of 100 questions, and three standard deviations.
    *_without("Recall-v0", 0.95, 0.38, 300_000, "memory", "policy.recurrent=none"),
    *_task(f"{TASKS}:Menu-v0", 7.78, 100_000),
    *_without("Menu-v0", 7.78, 1.0, 100_000, "masks", "environment.mask_key="),
)
