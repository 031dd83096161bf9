"""The wheel: what it installs, and that nothing else installs the same."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"gateway", "headrace", "k8s", "router"}


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
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
