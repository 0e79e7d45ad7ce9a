"""The house keeps its shape: names, sizes, directions, and what a wheel puts into other people's site-packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_stdlib_bisect_and_random_are_importable_from_the_root() -> None:
    code = "import bisect, random; assert bisect.insort and 'soakrig' not in bisect.__file__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_file_over_400_lines() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_one_top_level_name_in_the_wheel_and_the_data_is_in_it(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"soakrig"}
    for data in (
        "py.typed",
        "soak/agent/tools.toml",
        "engine/embedded/tokenizer.json",
        "engine/models.toml",
        "engine/preflight/versions.toml",
        "soak/watch/xid_catalogue.json",
        "reports/templates/campaign.html.jinja",
        "reports/templates/campaign.css",
        "reports/templates/run.html.jinja",
        "reports/templates/run.js",
        "reports/templates/runs.html.jinja",
        "reports/templates/runs.js",
        "reports/templates/live.js",
        "reports/templates/compare.html.jinja",
        "reports/templates/parts.html.jinja",
        "reports/templates/plan.html.jinja",
        "reports/templates/plan.css",
        "reports/templates/plan_bars.svg.jinja",
        "reports/templates/plan_lines.svg.jinja",
        "reports/templates/bundle_issue.md.jinja",
        "reports/templates/bundle_redactions.md.jinja",
        "reports/bundle/standalone.py",
    ):
        assert f"soakrig/{data}" in names


def test_the_tour_names_every_package_and_module_folder() -> None:
    tour = (ROOT / "docs" / "whats-here.md").read_text()
    packages = {path.parent.relative_to(ROOT / "src" / "soakrig") for path in SOURCES if path.name == "__init__.py"}
    missing = [str(package) for package in packages if str(package) != "." and f"`{package}/" not in tour]
    assert not missing


def test_the_tour_names_only_files_that_exist() -> None:
    tour = (ROOT / "docs" / "whats-here.md").read_text()
    rooms = "record|soak|engine|bisect|reproducers|reports|cli"
    named = re.findall(rf"`((?:{rooms})/[\w/]+\.(?:py|json|toml|jinja))`", tour)
    assert named
    assert [name for name in named if not (ROOT / "src" / "soakrig" / name).exists()] == []


def test_nobody_ends_processes_by_name() -> None:
    pattern = re.compile(r"\b(?:pkill|killall)\b|os\.killpg|kill\(\s*-")
    hits = [str(path.relative_to(ROOT)) for path in SOURCES if pattern.search(path.read_text())]
    # journalctl and dmesg are children in a process group of their own
    assert set(hits) <= {"src/soakrig/soak/watch/followed_command.py"}


def test_servers_bind_loopback_only() -> None:
    hits = [str(path) for path in SOURCES if re.search(r"0\.0\.0\.0|host=\"\"|\"::\"", path.read_text())]
    assert not hits


@pytest.mark.parametrize("page", ["README.md", "docs/exit-codes.md"])
def test_exit_codes_are_documented(page: str) -> None:
    text = (ROOT / page).read_text()
    assert all(f"{code}" in text for code in (0, 1, 2, 3, 64, 70))


def test_every_public_name_has_a_docstring() -> None:
    missing: list[str] = []
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
                if not name.startswith("_") and name != "main" and ast.get_docstring(node) is None:
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
