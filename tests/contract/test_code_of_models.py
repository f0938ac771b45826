"""A model's folder is data: nothing that reads one may run code of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("actor", "benchmarks", "broker", "examples", "learner", "penstock")
WITHOUT_CODE = {"PeftConfig"}
"""Classes whose `from_pretrained` reads settings alone."""
CHECKED_ADAPTERS = {"penstock/workloads/language/reward/reward_model.py"}
"""Where adapters are read, behind `check_adapter`."""


def loads(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Class and call of everything in a file that reads a model, a tokenizer or their settings."""
    text = path.read_text()
    if "from_pretrained" not in text and "from_config" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func.value)
            if node.func.attr == "from_pretrained" or (
                node.func.attr == "from_config" and name.startswith("Auto")
            ):
                yield name, node


def refuses_code(call: ast.Call) -> bool:
    """Whether the call itself says so: a dictionary of arguments does not count."""
    return any(
        keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def mistakes(path: Path) -> list[str]:
    """Calls in a file that could run code of what they read."""
    place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return [
        f"{place}:{call.lineno}: {name}"
        for name, call in loads(path)
        if name not in WITHOUT_CODE
        and not refuses_code(call)
        and not (name == "PeftModel" and place in CHECKED_ADAPTERS)
    ]


def test_every_load_of_a_model_refuses_its_code() -> None:
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert sum(len(list(loads(path))) for path in paths) > 6
    assert [mistake for path in paths for mistake in mistakes(path)] == []


def test_the_rule_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "careless.py"
    path.write_text(
        "AutoTokenizer.from_pretrained(folder)\n"
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)\n"
        "AutoModel.from_config(config, **{'trust_remote_code': False})\n"
        "PeftModel.from_pretrained(network, folder)\n"
        "AutoModel.from_pretrained(folder, trust_remote_code=False)\n"
    )
    assert [line.split(":")[1] for line in mistakes(path)] == ["1", "2", "3", "4"]
