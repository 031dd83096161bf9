"""The import contracts cover the code as it is: a new module cannot stay outside them unnoticed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_IO = {"router.state", "router.service"}


def test_every_router_module_without_io_is_held_to_purity() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (purity,) = (contract for contract in linter["contracts"] if "router.spec" in contract.get("source_modules", ()))
    parts = [path for path in (ROOT / "router").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = {f"router.{path.stem}" for path in parts if path.stem != "__init__"}
    assert modules - WITH_IO == set(purity["source_modules"])
    assert {"asyncio", "socket", "redis", "grpc", "aiohttp"} <= set(purity["forbidden_modules"])


def test_no_lock_file_names_a_package_index() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert [lock.name for lock in locks] == ["base.txt", "build.txt", "dev.txt", "k8s.txt", "local.txt", "weights.txt"]
    peers = sorted((ROOT / "requirements" / "peers").glob("*.txt"))
    assert peers, "what the benches compare with"
    for lock in (*locks, *peers):
        assert "://" not in lock.read_text()
        assert "--hash=sha256:" in lock.read_text()


def test_the_example_shows_the_chat_template_the_embedded_fleet_uses() -> None:
    example = ROOT / "examples" / "templates" / "chatml.jinja"
    assert example.read_text() == (ROOT / "headrace" / "local" / "templates" / "chatml.jinja").read_text()
