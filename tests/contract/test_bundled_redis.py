"""The Redis that the chart bundles, with its command and the gateways' URL of it, as a real Valkey."""

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError

from router.spec.fleet import RedisSpec
from router.spec.wording import pattern_of, text_fault
from tests.helm import Helm
from tests.valkey import ValkeyProcess, servers_here


def filled_in(text: str, password: str) -> str:
    return text.replace("$(REDIS_PASSWORD)", password)


async def test_it_lets_in_the_gateways_with_their_url_and_nobody_without_the_password(tmp_path: Path) -> None:
    with Helm() as helm:
        documents = {(one["kind"], one["metadata"]["name"]): one for one in helm.documents({})}
    password = documents["Secret", "headrace-redis"]["stringData"]["password"]
    (server,) = documents["Deployment", "headrace-redis"]["spec"]["template"]["spec"]["containers"]
    (gateway,) = documents["Deployment", "headrace"]["spec"]["template"]["spec"]["containers"]
    (url,) = [filled_in(one["value"], password) for one in gateway["env"] if one["name"] == "HEADRACE_REDIS_URL"]
    assert text_fault(url, pattern_of(RedisSpec.__annotations__["url"])) is None
    program, *options = [filled_in(word, password) for word in server["command"]]
    assert program == "valkey-server"

    running = ValkeyProcess(servers_here()[0], tmp_path, *options)
    running.url = url.replace("headrace-redis:6379", f"127.0.0.1:{running.port}")
    once = Retry(NoBackoff(), 0)
    async with running, running.client() as client, Redis(port=running.port, protocol=2, retry=once) as stranger:
        assert await client.ping()
        with pytest.raises(AuthenticationError):
            await stranger.ping()
