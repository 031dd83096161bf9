"""Fixtures that several contract tests share."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.upstream.triton.tokens import TokenCodec
from tests.contract.keyed_gateway import answer
from tests.contract.triton_adapter import Adapt, Adapter, adapter
from tests.contract.triton_models_server import TritonModels
from tests.harness import ScriptedEngine
from tests.issuer import LocalIssuer
from tests.tokenizer import byte_level
from tests.valkey import ValkeyProcess, servers_here


@pytest_asyncio.fixture(params=servers_here(), ids=lambda path: Path(path).name)
async def redis_server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ValkeyProcess]:
    """A server of the test's own: Valkey, and Debian's Redis where it is installed."""
    async with ValkeyProcess(request.param, tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    """One that answers every chat with `hello`."""
    async with ScriptedEngine(answer) as engine:
        yield engine


@pytest_asyncio.fixture
async def issuer() -> AsyncIterator[LocalIssuer]:
    async with LocalIssuer() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer, for models of token ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level(path)
    return path


@pytest.fixture
def codec(tokenizer_file: Path) -> TokenCodec:
    """The same, ready to use."""
    return TokenCodec(tokenizer_file.read_bytes())


@pytest_asyncio.fixture(loop_scope="session")
async def adapt(server: TritonModels) -> AsyncIterator[Adapt]:
    """Makes adapters for models of the module's `server`, and closes them."""
    made: list[Adapter] = []

    async def make(model: str, **options: Any) -> Adapter:
        made.append(await adapter(server, model, **options))
        return made[-1]

    yield make
    for each in made:
        await each.engine.close()
