import json
import os
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import language, update
from benchmarks.language import Loop, Outcome, summarise
from benchmarks.path import Shape, Transfer, compared
from benchmarks.peers import CARTPOLE, Contender, first_solved
from benchmarks.peers import Outcome as PeersOutcome
from benchmarks.peers import summarise as peers_summarise
from benchmarks.peers.others import liked
from benchmarks.proofs import (
    DOCS,
    MARKS,
    PROOFS,
    RESULTS,
    Proof,
    Record,
    append,
    missing,
    read,
    run,
    standing,
    thin,
    write,
    written,
)
from benchmarks.stand import Options, cpu_seconds
from benchmarks.train import FIRST_UPDATE, Ended, Messages, logged_at_s, piped_settings
from penstock.config.algorithm_sections import PPOSection, TokenPPOSection
from penstock.config.settings import PolicySection, load
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.algorithms.responses import read_responses
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import assemble, check_meaning
from penstock.policy.policy import build
from penstock.protocol.fragment import check
from penstock.protocol.limits import KIB
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from penstock.workloads.rlhf.environment import for_environment

SHAPE = language.Shape(layers=1, width=32, vocabulary=40, responses=6)


@pytest.mark.parametrize("lora", [True, False])
def test_both_loops_make_the_same_update(tmp_path: Path, lora: bool) -> None:
    torch.manual_seed(0)
    SHAPE.model().save_pretrained(tmp_path)
    given = LanguageSection(model=str(tmp_path), lora=lora, rank=4)
    # Not Adam's first step, in which rounding decides the sign of a gradient that is next to 0.
    section = TokenPPOSection(
        epochs=1, minibatches=1, adam_epsilon=1.0, learning_rate=1.0, value_clip=None, max_gradient_norm=1e9
    )
    tokens = torch.randint(3, SHAPE.vocabulary, (SHAPE.responses, 48))
    policy = LanguagePolicy(given, seed=0)
    before = {name: one.detach().clone() for name, one in policy.trained().items()}
    loop = Loop(given, section, tokens, language.PROMPT)
    theirs = [one for one in loop.network.parameters() if one.requires_grad]
    with torch.no_grad():
        for own, other in zip(policy.trained().values(), theirs, strict=True):
            other.copy_(own)
        for own, other in zip(policy.critic.parameters(), loop.head.parameters(), strict=True):
            other.copy_(own)
    batch = language.batch_of(tokens, SHAPE.vocabulary)
    responses = read_responses(batch)
    assert responses is not None
    with torch.no_grad():
        batch.log_prob[-32:] = loop.read(loop.network, tokens)[0].t()
    loop.update(responses.reward[responses.last])
    assert TokenPPO(policy, section, seed=0).update(batch, progress=0.0).applied
    for own, other in zip(policy.trained().values(), theirs, strict=True):
        assert torch.allclose(own, other, atol=1e-5)
    assert any((one - before[name]).abs().max() > 1e-3 for name, one in policy.trained().items())


def test_the_shape_of_gpt2_has_gpt2s_parameter_count() -> None:
    with torch.device("meta"):
        model = language.SHAPES["gpt2"].model()
    positions = language.PROMPT + language.RESPONSE
    assert model.num_parameters() == 124_439_808 - (1024 - positions) * 768
    assert model.config.n_head == 12


def test_the_ratio_is_to_the_better_setting_of_the_same_round() -> None:
    rounds = [
        {
            name: Outcome(tokens=count, seconds=10.0, cpu_seconds=10.0 if name == "Penstock" else 20.0)
            for name, count in zip(("Penstock", "one", "two"), tokens, strict=True)
        }
        for tokens in ((400, 200, 100), (40, 5, 10), (300, 100, 50))
    ]
    mine, one, two = summarise(rounds).rows
    assert list(mine) == ["Penstock", 30.0, pytest.approx(3.0), 30.0]
    assert list(one) == ["one", 10.0, None, 5.0]
    assert two[1] == 5.0


def test_one_batch_of_the_benchmark_is_one_gradient_step_on_one_fragment() -> None:
    said = tomllib.loads(language.RECIPE)
    settings = load([for_environment("liked-words", "ppo"), said])
    section = settings.algorithm
    assert isinstance(section, TokenPPOSection)
    assert section.batch_steps == settings.environment.count * settings.actor.unroll_length
    assert (section.epochs, section.minibatches, section.kl_coefficient) == (1, 1, 0.0)
    assert settings.environment.count == language.RESPONSES
    assert language.RESPONSES % language.GROUP == 0
    assert liked(["w1"] * 3, ["w10 w3 w8 w4", "w11", ""]) == [0.75, 0.0, 0.0]


def transfer(megabytes_per_second: float) -> Transfer:
    """A transfer at this rate: its clock is turned, not waited for."""
    done = Transfer()
    done.add(1, 10)
    done._first_s = 1.0
    done.add(4, round(megabytes_per_second * 1e6))
    done._last_s = 2.0
    return done


def test_the_first_arrival_is_in_no_rate() -> None:
    done = transfer(100)
    assert (100, 5) == (done.megabytes_per_second, done.entries)
    alone = Transfer(processes={"reader": os.getpid()})
    alone.add(1, 10)
    alone.finish()
    assert (0.0, {}) == (alone.megabytes_per_second, alone.cpu_seconds_per_gb)


def test_cpu_seconds_of_an_ended_process_are_known() -> None:
    body = "import time\nopen('/proc/self/comm', 'w').write('a) b (c')\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", body]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        spent = cpu_seconds(process.pid)
    assert spent >= 0.25


def test_the_ratio_is_to_the_better_compressor() -> None:
    plain = {
        "hiredis": [transfer(100), transfer(100), transfer(200)],
        "python": [transfer(90), transfer(90), transfer(900)],
    }
    packer, ratio = compared([transfer(50), transfer(30), transfer(40)], plain)
    assert packer == "hiredis"
    assert ratio == pytest.approx(0.3)


@pytest.mark.parametrize(("size", "steps", "slots"), [(2 * KIB, 8, 8), (64 * KIB, 16, 8), (512 * KIB, 16, 8)])
def test_a_made_up_fragment_conforms_and_nearly_fills_its_size(size: int, steps: int, slots: int) -> None:
    shape = Shape.of(size, steps, slots)
    fragment = shape.template(session=1)
    check(fragment, shape.schema, "bench")
    assert len(fragment.payload) == shape.fragment_bytes
    assert 0.85 * size < len(fragment.payload) <= size


def outcome(steps_per_second: float, seconds: float | None = None) -> PeersOutcome:
    """A run that was solved after `seconds`, whose processes kept one core busy."""
    shell = None if seconds is None else seconds + 1
    return PeersOutcome(
        steps_per_second=steps_per_second,
        cpu_per_million=1e6 / steps_per_second,
        solved_s=seconds,
        from_shell_s=shell,
    )


def test_a_run_is_solved_by_a_hundred_episodes() -> None:
    lines: list[dict[str, Any]] = [
        {"episodes": 0, "mean_return": None},
        {"episodes": 99, "mean_return": 500.0},
        {"episodes": 100, "mean_return": 474.0},
        {"episodes": 120, "mean_return": 475.0},
        {"episodes": 130, "mean_return": 480.0},
    ]
    assert first_solved(lines, 475) == lines[3]
    assert first_solved(lines[:3], 475) is None


def test_ratios_compare_medians_with_the_best_peer() -> None:
    contenders = [Contender(name, run=outcome, is_ours=name == "ours") for name in ("ours", "fast", "clever")]
    outcomes = {
        "ours": [outcome(30, 4), outcome(10, 6), outcome(20, 5)],
        "fast": [outcome(10), outcome(10), outcome(10)],
        "clever": [outcome(5, 10), outcome(5, None), outcome(5, 30)],
    }
    ours, fast, clever = peers_summarise(CARTPOLE, contenders, outcomes).rows
    assert list(ours[1:]) == ["3 of 3", 20, 2.0, 5, 0.25, 6, pytest.approx(6 / 21), 50_000, 0.5]
    assert list(fast[1:]) == ["0 of 3", 10, None, None, None, None, None, 100_000, None]
    assert list(clever[1:]) == ["2 of 3", 5, None, 20, None, 21, None, 200_000, None]
    table = peers_summarise(CARTPOLE, contenders[:1], {"ours": [outcome(10, 5)]}, ["fast"])
    assert list(table.rows[0][2:]) == [10, None, 5, None, 6, None, 100_000, None]
    assert "no environment: fast" in table.note


PROOF = Proof(task="CartPole-v1", algorithm="ppo", seed=1, threshold=475, total_steps=1000)
RECORD = Record(
    task="CartPole-v1",
    algorithm="ppo",
    variant="",
    seed=1,
    command=PROOF.command,
    commit="abc",
    date="2026-01-01",
    machine="2 cores",
    passed=True,
    result={
        "evaluation": {"mean": 500.0},
        "env_steps": 900,
        "training_seconds": 2.5,
        "staleness": {"p50": 1},
    },
    curve=[(0, 20.0), (900, 480.0)],
)


def program(tmp_path: Path, body: str) -> tuple[str, str]:
    path = tmp_path / "program.py"
    path.write_text(f"import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[-1])\n{body}\n")
    return sys.executable, str(path)


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    assert len({proof.key for proof in PROOFS}) == len(PROOFS)
    path = tmp_path / "results" / "proofs.jsonl"
    second = replace(PROOF, seed=2)
    assert missing([PROOF, second], read(path), retry=False) == [PROOF, second]
    append(path, replace(RECORD, passed=False))
    assert missing([PROOF, second], read(path), retry=False) == [second]
    assert missing([PROOF, second], read(path), retry=True) == [PROOF, second]
    append(path, RECORD)
    assert missing([PROOF, second], read(path), retry=True) == [second]
    assert len(path.read_text().splitlines()) == 2
    for changed in (replace(PROOF, threshold=490), replace(PROOF, total_steps=900)):
        assert missing([changed], read(path), retry=False) == [changed], "a record proves its command alone"
    assert "--set algorithm.name=impala" in replace(PROOF, algorithm="impala").command
    assert "algorithm.name" not in PROOF.command


@pytest.mark.parametrize(("mean", "passed"), [(475.0, True), (474.9, False)])
def test_a_run_passes_if_its_evaluation_does(tmp_path: Path, mean: float, *, passed: bool) -> None:
    body = f"""
folder.mkdir()
rows = [{{"env_steps": n, "mean_return": n and 1.0 * n}} for n in range(3)]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
print(json.dumps({{"solved": True, "evaluation": {{"mean": {mean}}}, "env_steps": 2, \
"training_seconds": 1.0}}))
"""
    record = run(PROOF, program(tmp_path, body))
    assert record.passed is passed
    assert record.curve == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert (
        record.command == "penstock train CartPole-v1 --seed 1 --target-return 475 --total-steps 1000 --json"
    )
    failed = run(PROOF, program(tmp_path, "print('cause', file=sys.stderr); sys.exit(1)"))
    assert not failed.passed
    assert failed.result == {"exit": 1, "error": "cause"}
    bounded = replace(PROOF, at_most=20.0)
    assert [bounded.passes(mean) for mean in (19.0, 20.0, 20.1, None)] == [True, True, False, False]
    assert not PROOF.passes(None)
    assert (bounded.wanted, PROOF.wanted) == ("≤ 20", "≥ 475")
    points = [(n, float(n)) for n in range(10_000)]
    thinned = thin(points)
    assert (len(thinned), thinned[0], thinned[-1]) == (60, points[0], points[-1])
    assert thin(points[:5]) == points[:5]


def test_the_page_shows_results_and_missing_runs(tmp_path: Path) -> None:
    proofs = [replace(PROOF, seed=seed) for seed in (1, 2, 3)]
    records = {RECORD.key: RECORD}
    failed = replace(RECORD, seed=2, passed=False, result={"exit": 1, "error": "x"})
    records[failed.key] = failed
    (tmp_path / "algorithms.md").write_text("before\n" + "earlier results\n".join(MARKS) + "behind\n")
    write(proofs, records, tmp_path)
    page = (tmp_path / "algorithms.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("behind\n")
    assert "earlier results" not in page
    assert "| CartPole-v1 | `ppo` | ≥ 475 within 1,000 | 1 of 3 | 500.0 | 900 | 2.5 | Gymnasium" in page
    assert "- CartPole-v1, `ppo`: not run: seed 3; not passed: seed 2" in page
    assert "# seeds 1, 2, 3\npenstock train CartPole-v1 --seed 1 " in page
    assert (tmp_path / "images" / "proofs.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_matches_its_records() -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert written(page, PROOFS, standing(PROOFS, read(RESULTS))) == page


LOG = """2026-01-02T03:04:05.250Z info learner lease acquired epoch=1
2026-01-02T03:04:06.750Z info learner learning ended why=steps env_steps=988
2026-01-02T03:04:09.000Z info learner checkpoint committed position=2
"""


def test_the_time_of_a_line_is_read_to_the_millisecond() -> None:
    assert logged_at_s(LOG, FIRST_UPDATE) - logged_at_s(LOG, "lease acquired") == 1.5
    assert logged_at_s(LOG, "lease acquired") == 1767323045.25
    with pytest.raises(ValueError, match="has no 'learning ended'.*acquired"):
        logged_at_s(LOG.splitlines()[0], FIRST_UPDATE)


def test_messages_come_whole_and_in_order() -> None:
    ours, theirs = (Messages(end) for end in socket.socketpair())
    for sent in (b"first", b"", memoryview(bytes(70_000))):
        ours.send(sent)
        assert theirs.has_come()
        assert theirs.receive() == sent
    assert not theirs.has_come()
    del ours
    with pytest.raises(Ended):
        theirs.receive()


def test_the_benchmark_learns_from_the_set_number_of_steps() -> None:
    command = [sys.executable, "-m", "benchmarks.train", "learn", "3000", "1"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    algorithm = piped_settings(3000, 1).algorithm
    assert isinstance(algorithm, PPOSection)
    assert 3000 <= told["steps"] < 3000 + 2 * algorithm.batch_steps
    assert min(told["seconds"], told["learner"], told["actor"]) > 0


def test_a_learner_takes_made_up_fragments() -> None:
    first, second = update.made_up(1), update.made_up(2)
    check(first, update.SCHEMA, update._RUN)
    check_meaning(first.header, first.arrays())
    assert first.payload != second.payload
    algorithm = PPO(build(update.OBSERVATION, update.ACTION, PolicySection(), 0), PPOSection(), seed=0)
    outcome = algorithm.update(assemble(update.opened([first]), torch.device("cpu")), progress=0.0)
    assert (outcome.applied, outcome.gradient_steps) == (True, 16)


def test_the_bare_loop_learns_the_parameters_of_the_policy() -> None:
    rows = update.made_up_rows(256)
    loop = update.Loop(rows, PPOSection(learning_rate=3e-3))
    policy = build(update.OBSERVATION, update.ACTION, PolicySection(), 0)
    shapes = sorted(tuple(own.shape) for own in policy.parameters())
    assert sorted(tuple(own.shape) for own in loop.parameters) == shapes
    before = _losses(loop, rows)
    for _ in range(20):
        loop.update()
    after = _losses(loop, rows)
    assert after[0] > before[0]
    assert after[1] < before[1]


def _losses(loop: update.Loop, rows: update.Rows) -> tuple[float, float]:
    """Mean of advantage times log-probability, and the squared error of the values."""
    observation, action, (_, advantage, target) = rows
    with torch.no_grad():
        log_prob = loop.actor(observation).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        error = (loop.critic(observation).squeeze(1) - target).square().mean()
    return float((advantage * log_prob).mean()), float(error)


@pytest.mark.slow
def test_the_benchmark_of_gpus_fills_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, nature = update.NETWORKS
    networks = (mlp, replace(nature, observation=update.box(36, 36, 4, dtype="uint8")))
    monkeypatch.setattr(update, "NETWORKS", networks)
    table = update.gpu_table(Options(device="cpu"))
    both = ("float32", "bfloat16")
    wanted = [(network.name, precision) for network in networks for precision in both]
    assert [(row[0], row[2]) for row in table.rows] == wanted
    for row in table.rows:
        shown = dict(zip(table.columns, row, strict=True))
        assert isinstance(shown["updates/s"], float)
        assert shown["updates/s"] > 0
        assert shown["GPU busy"] is None


def test_the_bare_loop_on_a_gpu_trains_the_same_network() -> None:
    network = update.NETWORKS[0]
    fragments = update.experience(network, small=True)
    loop = update.BareLoop(network, fragments, torch.device("cpu"), bfloat16=False)
    before = [own.detach().clone() for own in loop.policy.parameters()]
    loop.update()
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.policy.parameters(), strict=True))
    if not torch.cuda.is_available():
        table = update.gpu_table(Options(device="cuda"))
        assert (list(table.rows), "no CUDA device" in table.note) == ([], True)
