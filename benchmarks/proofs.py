"""The learning proofs: which task each algorithm must solve, from which seeds, within how many steps."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One run of `penstock train` that must end with an evaluation of at least `threshold`.

    at_most: instead, a bound that the evaluation must not exceed: the run shows what cannot be learned.
    variant: difference to the plain run of that task, "" for none. options: further arguments.
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
        """Return whether a mean return, None for no evaluation, meets the bound."""
        if evaluation is None:
            return False
        return evaluation >= self.threshold if self.at_most is None else evaluation <= self.at_most

    @property
    def wanted(self) -> str:
        """Return the bound, for people."""
        return f"≥ {self.threshold:g}" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the key that makes two records the same entry."""
        return self.task, self.algorithm, self.variant, self.seed

    @property
    def title(self) -> str:
        """Return task and variant, for people."""
        name = self.task.rpartition(":")[2]
        return f"{name}, {self.variant}" if self.variant else name

    @property
    def command(self) -> str:
        """Return the command as a person types it."""
        return f"penstock {' '.join(self.arguments())}"

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments behind `penstock`, without the folder of the run."""
        algorithm = () if self.algorithm == "ppo" else ("--set", f"algorithm.name={self.algorithm}")
        return (
            "train",
            self.task,
            "--seed",
            str(self.seed),
            "--target-return",
            f"{self.threshold:g}",
            "--total-steps",
            str(self.total_steps),
            *algorithm,
            *self.options,
            "--json",
        )


SEEDS = (1, 2, 3, 4, 5)

SOURCES = {
    "CartPole-v1": "Gymnasium's own threshold; RL Baselines3 Zoo: PPO 500, A2C 500",
    "Acrobot-v1": "Gymnasium's own threshold; RL Baselines3 Zoo: PPO −73.5, A2C −83.4",
    "MountainCar-v0": "Gymnasium's own threshold; RL Baselines3 Zoo: DQN −100.8, PPO −110.4",
    "Pendulum-v1": "RL Baselines3 Zoo: PPO −172.2, SAC −157.0",
    "LunarLander-v3": "Gymnasium's own threshold is 200; RL Baselines3 Zoo: PPO 242.1, DQN 154.4 (v2)",
    "BipedalWalker-v3": "RL Baselines3 Zoo: PPO 213.3",
    "HalfCheetah-v5": "RL Baselines3 Zoo: PPO 5,819, A2C 3,041, SAC 9,535 at 1M (v3)",
    "Hopper-v5": "RL Baselines3 Zoo: PPO 2,410, SAC 2,326 at 1M (v3)",
}
"""Published results for the task, for the page: github.com/DLR-RM/rl-baselines3-zoo, `benchmark.md`."""


def _task(
    task: str,
    threshold: float,
    total_steps: int,
    seeds: tuple[int, ...] = SEEDS,
    algorithm: str = "ppo",
    options: tuple[str, ...] = (),
) -> list[Proof]:
    return [
        Proof(
            task=task,
            algorithm=algorithm,
            seed=seed,
            threshold=threshold,
            total_steps=total_steps,
            options=options,
        )
        for seed in seeds
    ]


def _seeing() -> list[Proof]:
    """Return proofs with images and parts: the optimum is 1 for Catch, 7/12 on average for Courier."""
    catch, courier = "workloads.control.tasks:Catch-v0", "workloads.control.tasks:Courier-v0"
    impala = ("--set", "policy.image_trunk=impala")
    return [
        *_task(catch, 0.95, 200_000, seeds=SEEDS[:3]),
        *_variant(catch, 0.95, 200_000, "IMPALA's trunk", impala),
        *_task(courier, 0.5, 200_000, seeds=SEEDS[:3]),
    ]


def _layers() -> list[Proof]:
    layers = {
        "layer norm": ("--set", "policy.hidden_norm=layer"),
        "batch norm": ("--set", "policy.hidden_norm=batch"),
        "dropout of 10%": ("--set", "policy.dropout=0.1"),
    }
    return [
        proof
        for name, options in layers.items()
        for proof in _variant("CartPole-v1", 475, 150_000, name, options)
    ]


def _variant(
    task: str, threshold: float, total_steps: int, variant: str, options: tuple[str, ...]
) -> list[Proof]:
    plain = _task(task, threshold, total_steps, seeds=SEEDS[:3])
    return [replace(proof, variant=variant, options=options) for proof in plain]


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
    """Return the same task without what it needs, which must not be learned."""
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
    *_task("CartPole-v1", 475, 500_000, algorithm="impala"),
    *_task("CartPole-v1", 475, 500_000, algorithm="reinforce"),
    *_task("Acrobot-v1", -100, 500_000),
    *_task("Pendulum-v1", -250, 500_000),
    *_task("LunarLander-v3", 230, 1_500_000),
    *_task("BipedalWalker-v3", 200, 5_000_000, seeds=(1,)),
    *_task("HalfCheetah-v5", 1_500, 1_000_000, seeds=(1, 2, 3)),
    *_task("Hopper-v5", 1_500, 1_000_000, seeds=(1, 2)),
    *_seeing(),
    *_layers(),
    *_task("MountainCar-v0", -110, 120_000, algorithm="dqn"),
    *_task("LunarLander-v3", 200, 300_000, algorithm="dqn"),
    *_task("Pendulum-v1", -180, 20_000, algorithm="sac"),
    *_task("HalfCheetah-v5", 4_000, 300_000, seeds=(1,), algorithm="sac"),
    *_task("Hopper-v5", 1_500, 200_000, seeds=(1,), algorithm="sac"),
    *_task(f"{TASKS}:Recall-v0", 0.95, 300_000),
    # A quarter of 100 questions, and three standard deviations.
    *_without("Recall-v0", 0.95, 0.38, 300_000, "memory", "policy.recurrent=none"),
    *_task(f"{TASKS}:Menu-v0", 7.78, 100_000),
    *_without("Menu-v0", 7.78, 1.0, 100_000, "masks", "environment.mask_key="),
)
