"""The habits of CONTRIBUTING work: fragments of the changelog, the hook before a commit, two installations."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()

CHANGELOG = """# Changelog

## [Unreleased]

### Changed

- An older change.

## [0.1.0]

### Fixed

- A bug of long ago.
"""


@pytest.fixture
def changelog() -> ModuleType:
    spec = importlib.util.spec_from_file_location("join", ROOT / "changelog.d" / "join.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fragments_come_on_top_of_the_newest_entries_of_their_kind(changelog: ModuleType, tmp_path: Path) -> None:
    texts = {"b.changed.md": "B.\n", "a.changed.md": "A is\nlonger.\n", "c.fixed.md": "C."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    joined = changelog.join(CHANGELOG, changelog.list_fragments(tmp_path))
    newest = "### Changed\n\n- A is longer.\n- B.\n- An older change.\n\n### Fixed\n\n- C.\n\n## [0.1.0]"
    assert joined == CHANGELOG.replace("### Changed\n\n- An older change.\n\n## [0.1.0]", newest)


def test_a_fragment_of_no_kind_is_refused(changelog: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.md").write_text("Mine.")
    with pytest.raises(ValueError, match=r"NAME\.KIND\.md, with KIND one of added, changed, fixed, removed\. Got mine"):
        changelog.list_fragments(tmp_path)


def test_the_fragments_that_are_there_can_be_joined(changelog: ModuleType) -> None:
    text = changelog.CHANGELOG.read_text()
    parts = changelog.list_fragments()
    assert changelog.join(text, parts).count("\n- ") == text.count("\n- ") + len(parts)


def test_what_runs_before_a_commit_is_make_check_and_downloads_nothing() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["language"], hook["entry"]) == ("local", "system", "make check")
    assert re.search(r"^check: ", MAKEFILE, re.MULTILINE)


def test_the_demo_is_installed_without_what_only_developers_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = " ".join(project["dependencies"])
    assert not re.search(r"\b(ray|flwr|mlflow|mkdocs|pandas|onnx|optuna|pytest)", core)
    installs = dict(re.findall(r"^(\.venv/\.\w+): .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    assert "-e ." in installs[".venv/.core"]
    assert "dev" not in installs[".venv/.core"]
    assert ".[dev]" in installs[".venv/.installed"]
    assert re.search(r"^demo: \.venv/\.core ", MAKEFILE, re.MULTILINE)
