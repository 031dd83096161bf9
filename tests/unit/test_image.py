"""The image, as far as it can be told without building it: its Dockerfile, what goes into it, and how large that is."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from tests.helm import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LARGEST_MB = 320
COMPILED_MB = 30
"""Of what Python compiles of it, as du counts: 24 when the imports of the Dockerfile were measured."""


def steps(name: str) -> list[str]:
    return re.findall(rf"(?m)^{name} (.*)$", DOCKERFILE)


def test_hadolint_has_nothing_against_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or "hadolint"
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_base_is_one_version_and_it_runs_as_the_chart_says_and_not_as_root() -> None:
    bases = {base.split(" AS ")[0] for base in steps("FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases.pop())
    (user,) = steps("USER")
    number = user.partition(":")[0]
    assert int(number) > 0
    for template in ("gateway.yaml", "tests/serves.yaml"):
        assert f'"headrace.podSecurity" (dict "user" {number})' in (CHART / "templates" / template).read_text()


def test_signals_reach_the_gateway_itself() -> None:
    assert steps("ENTRYPOINT") == ['["headrace"]']
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "headrace" in scripts


def test_everything_that_the_wheel_is_made_of_is_copied_and_nothing_that_is_not_there() -> None:
    copied = {source for step in steps("COPY") if not step.startswith("--from") for source in step.split()[:-1]}
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= copied
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all(source in let_in or f"{Path(source).parent}/*.txt" in let_in for source in copied)


def test_what_it_installs_is_not_too_large() -> None:
    names = re.findall(r"(?m)^([a-z0-9-]+)==", (ROOT / "requirements" / "k8s.txt").read_text())
    files = {Path(str(file.locate())) for name in names for file in importlib.metadata.files(name) or []}
    size = sum(file.stat().st_blocks * 512 for file in files if file.is_file() and file.suffix != ".pyc")
    assert size / 2**20 + COMPILED_MB < LARGEST_MB


def test_what_is_compiled_into_it_can_be_imported() -> None:
    (modules,) = re.findall(r'python -c "import ([^"]*)"', DOCKERFILE)
    for module in re.split(r"[,\s\\]+", modules):
        assert importlib.util.find_spec(module) is not None, module


def test_the_chart_runs_the_version_that_is_here() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
