"""The wheel: what it installs, and that nothing else installs the same."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gateway.relay.steady import COMPILED

ROOT = Path(__file__).parents[2]
PACKAGES = {"gateway", "headrace", "k8s", "router"}


def build(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what was said while it was built."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True, text=True, timeout=120
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


def compiled(files: list[str]) -> list[str]:
    return [name for name in files if name.endswith(".so")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_installs_four_packages_and_nothing_else(wheel_files: list[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_files}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES


def test_no_other_installed_distribution_provides_our_packages() -> None:
    providers = importlib.metadata.packages_distributions()
    assert {name: set(providers.get(name, [])) - {"headrace"} for name in PACKAGES} == {
        name: set() for name in PACKAGES
    }


def test_every_file_the_embedded_engines_need_is_in_the_wheel(wheel_files: list[str]) -> None:
    sources = [path for path in (ROOT / "headrace" / "local").rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in sources if "__pycache__" not in path.parts}
    assert "headrace/local/templates/chatml.jinja" in wanted
    assert wanted <= set(wheel_files)


def test_the_licence_comes_with_the_wheel(wheel_files: list[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)


@pytest.mark.skipif(not COMPILED, reason="needs a C compiler and Python's headers")
def test_the_wheel_brings_the_relay_compiled_for_this_python_and_its_source(
    wheel: Path, wheel_files: list[str]
) -> None:
    (module,) = compiled(wheel_files)
    assert module.startswith("gateway/relay/_steady.")
    assert f"cp{sys.version_info[0]}{sys.version_info[1]}" in wheel.name
    assert "gateway/relay/_steady.c" in wheel_files


def test_a_wheel_built_without_a_compiler_says_so_and_fits_every_platform(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, CC="no-such-compiler")
    assert "The relay is not compiled and will be slower: there is no C compiler (no-such-compiler)." in said
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert not compiled(files)
    assert "gateway/relay/steady.py" in files
