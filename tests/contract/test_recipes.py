"""The recipes: each resolves, and what one says of memory is what its own formulas give."""

import re
from pathlib import Path
from typing import Final

import pytest
import tomli_w

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.launch.commands.request import Request
from penstock.launch.gateway.job_templates import configured, read_templates
from penstock.launch.run.plan import make_plan
from penstock.workloads.rlhf.environment import language

FOLDER: Final = Path(__file__).parents[2] / "penstock" / "recipes"
RECIPES: Final = sorted(FOLDER.glob("*.toml"))
SERVICES: Final = sorted((FOLDER / "service").glob("*.toml"))
TEXT: Final = [file for file in SERVICES if read_templates(file.parent)[file.stem].kind == "rlhf"]
GIB: Final = 1024**3


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves(recipe: Path, tmp_path: Path) -> None:
    if 'vectorise = "envpool"' in recipe.read_text():
        pytest.importorskip("envpool", reason="EnvPool is an extra")
    plan = make_plan(Request(what=str(recipe), run_dir=tmp_path / "run"))
    assert plan.settings.learner.total_steps
    assert plan.settings.run.startswith(recipe.stem)
    if plan.settings.workload == "rlhf":
        assert language(plan.settings.environment).response_tokens < plan.settings.actor.unroll_length


@pytest.mark.parametrize("file", SERVICES, ids=lambda path: path.stem)
def test_a_template_resolves_with_its_defaults_and_its_bounds(file: Path, tmp_path: Path) -> None:
    template = read_templates(file.parent)[file.stem]
    for bound in ("least", "most", "default"):
        chosen = {name: getattr(one, bound) for name, one in template.numbers.items()}
        recipe = configured(template, template.chosen(chosen))
        (tmp_path / "job.toml").write_text(tomli_w.dumps(recipe))
        make_plan(Request(what=str(tmp_path / "job.toml"), run_dir=tmp_path / "run"))


@pytest.mark.parametrize("file", TEXT, ids=lambda path: path.stem)
def test_a_text_templates_fragments_fit_its_updates(file: Path, tmp_path: Path) -> None:
    template = read_templates(file.parent)[file.stem]
    recipe = configured(template, template.chosen({}))
    (tmp_path / "job.toml").write_text(tomli_w.dumps(recipe))
    settings = make_plan(Request(what=str(tmp_path / "job.toml"), run_dir=tmp_path / "run")).settings
    fragment = settings.actor.unroll_length * settings.environment.count
    section = settings.algorithm
    assert isinstance(section, TokenPPOSection)
    assert fragment <= section.batch_steps
    assert settings.learner.total_updates == template.chosen({})["maxSteps"]
    longest = language(settings.environment).response_tokens * settings.environment.count
    assert settings.learner.total_steps == settings.learner.total_updates * section.batch_steps
    assert section.batch_steps >= 2 * longest, "an update may hold two fragments: its steps would end the run"


def test_the_memory_of_the_gpu_adds_up() -> None:
    text = (FOLDER / "rlhf-gpu.toml").read_text().partition("# B·T·V is")[0]
    *rows, total = [float(number) for number in re.findall(r"  (\d+\.\d\d)$", text, re.MULTILINE)]
    assert sum(rows) == pytest.approx(total, abs=0.005)
    vocabulary, wide, layers, inside, keys, rank = 151_936, 896, 24, 4_864, 128, 16
    weights = vocabulary * wide + layers * (
        2 * (wide**2 + wide * keys) + 3 * wide * inside + 3 * wide + 2 * keys
    )
    weights += wide
    adapter = layers * rank * (4 * wide + 2 * (wide + keys) + 3 * (wide + inside))
    assert f"{weights:,} parameters" in text
    assert f"A = N·r·(2·(H + H) + 2·(H + K) + 3·(H + I)) = {adapter:,}" in text
    layer = 8 * wide + 5 * inside
    actor = [
        2 * weights + 4 * adapter,
        4 * 2 * layers * keys * 64 * 256,
        16 * 64 * vocabulary,
        2 * 64 * 128 * layer,
    ]
    computed = [
        2 * weights,
        32 * adapter,
        32 * (wide**2 + 2 * wide + 1),
        24 * 1024 * vocabulary,
        2 * 2048 * wide * layers,
        4 * 2048 * layer,
        *actor,
        sum(actor),
        4 * weights + 4 * adapter,
        4 * 16_384 * layer,
        2.5 * GIB,
    ]
    assert rows == [pytest.approx(size / GIB, abs=0.006) for size in computed]


def test_the_reference_has_the_numbers_of_the_presets() -> None:
    page = (FOLDER.parents[1] / "docs" / "rlhf-reference.md").read_text()
    rows = re.findall(r"^\| `(\w+)`.*?\| (\d+) tokens \| (\d+) \| ([\d,]+) \|", page, re.MULTILINE)
    told = {name: [int(one.replace(",", "")) for one in figures] for name, *figures in rows}
    numbers = {file.stem: read_templates(file.parent)[file.stem].numbers for file in TEXT}
    recipes = {file.stem: read_templates(file.parent)[file.stem].recipe for file in TEXT}
    assert told == {
        name: [
            recipe["environment"]["kwargs"]["response_tokens"],
            recipe["policy"]["kwargs"]["rank"],
            numbers[name]["maxSteps"].default,
        ]
        for name, recipe in recipes.items()
    }
