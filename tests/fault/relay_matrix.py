"""A gateway between scripted engines and plain-socket clients, and what must hold of every request put to it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence

from router.spec.fleet import EndpointSpec, FleetSpec, OutlierSpec, PoolSpec, ProbeSpec, RouteSpec, TimeoutSpec
from router.spec.gateway import GatewaySpec, RetrySpec
from tests.fault.relay_client import Ask, Client, Seen
from tests.fault.relay_model import Answer, ends, leaves_nothing, outcomes
from tests.fault.relay_scripts import HEALTHY, HEALTHY_STREAM, Ending, Play, Script, ScriptPlayer
from tests.harness import RunningGateway, running_gateway

HASTY = TimeoutSpec(first_byte="200ms", idle="100ms")
"""How soon a silent engine is given up, where a script has it fall silent."""
OUTER_S = 10.0
"""How long anything may take on a busy machine."""
_LATE_S = 0.04
"""A machine that holds up this process for so long may have timeouts catch what they are not to catch."""


def fleet(player: ScriptPlayer, hasty: TimeoutSpec) -> FleetSpec:
    """A route for each protocol, with one endpoint or two, patient or not: `openai-1`, `kserve-2-hasty`, ..."""
    pools = {}
    for protocol, endpoints, timeouts in itertools.product(("openai", "triton"), (1, 2), (TimeoutSpec(), hasty)):
        name = route_name(protocol == "triton", endpoints == 2, timeouts is hasty)
        pools[name] = PoolSpec(
            protocol="triton" if protocol == "triton" else "openai",
            model="engine-model",
            transport="http",
            endpoints=[
                EndpointSpec(id=f"{name}-{number}", http=f"http://127.0.0.1:{player.ports[number]}")
                for number in range(endpoints)
            ],
            timeouts=timeouts,
            probe=ProbeSpec(interval="1s", timeout="10s"),
            outlier=OutlierSpec(max_ejected="0%"),
        )
    retry = RetrySpec(budget="off")
    routes = {name: RouteSpec(pool=name) for name in pools}
    return FleetSpec(fleet="test", pools=pools, routes=routes, gateway=GatewaySpec(retry=retry))


def route_name(kserve: bool, elsewhere: bool, hasty: bool) -> str:
    return f"{'kserve' if kserve else 'openai'}-{2 if elsewhere else 1}{'-hasty' if hasty else ''}"


class Matrix:
    """Puts requests to the gateway and compares what comes of them with what may."""

    def __init__(self, player: ScriptPlayer, running: RunningGateway) -> None:
        self.player = player
        self.running = running
        self._numbers = itertools.count()
        self._late_at = float("-inf")

    async def check(self, script: Script, ask: Ask) -> None:
        """One request to an engine that does as `script` says, and one more. Raises AssertionError."""
        for attempt in range(10):
            started = asyncio.get_running_loop().time()
            try:
                await self._check(script, ask)
            except AssertionError:
                if attempt == 9 or not _hasty(script) or self._late_at < started:
                    raise
            else:
                return
            await asyncio.sleep(0.1 * attempt)  # the machine is too busy for deadlines of milliseconds

    async def check_all(self, cases: Iterable[tuple[Script, Ask]], at_once: int = 24) -> int:
        """Check many cases side by side, and return how many there were; all that fail are told of."""
        waiting, problems, count = iter(cases), list[str](), 0

        async def work() -> None:
            nonlocal count
            for script, ask in waiting:
                count += 1
                try:
                    await self.check(script, ask)
                except Exception as error:
                    problems.append(f"{error!r}")

        await asyncio.gather(*(work() for _ in range(at_once)))
        assert not problems, f"{len(problems)} of {count} cases:\n\n" + "\n\n".join(problems[:5])
        await self.running.until_idle(OUTER_S)
        return count

    async def watch(self) -> None:
        """Note when the machine holds up this process."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LATE_S / 4
            await asyncio.sleep(_LATE_S / 4)
            if loop.time() - due > _LATE_S:
                self._late_at = loop.time()

    async def _check(self, script: Script, ask: Ask) -> None:
        healthy = HEALTHY_STREAM if ask.stream else HEALTHY
        route = route_name(ask.api.kserve, ask.elsewhere, _hasty(script))
        client = Client(self.running.http_port)
        request_id, play = self.announce(script, healthy)
        next_id, _ = self.announce(healthy, healthy)
        try:
            async with asyncio.timeout(OUTER_S):
                seen = await client.ask(ask.request(route, request_id))
                allowed = outcomes(script, ask)
                assert any(one.fits(ask, seen) for one in allowed), _told("the client saw", script, ask, seen, allowed)
                self._check_head(ask, seen, request_id)
                assert not seen.rest, _told("more than a response", script, ask, seen, allowed)
                await play.done.wait()
                if not leaves_nothing(script) and script.ending is not Ending.RESET:
                    await self.running.until(
                        lambda: play.hung_up == play.played,
                        _told("the engine was not told", script, ask, seen, allowed),
                        OUTER_S,
                    )
                    assert not play.reused, _told("its connection was used again", script, ask, seen, allowed)
                after = await client.ask(ask.request(route, next_id))
                expected = Answer(healthy.body, kind=healthy.kind)
                assert expected.fits(ask, after), _told("the next request got", script, ask, after, (expected,))
        except TimeoutError:
            raise AssertionError(f"not within {OUTER_S} s: {script!r}\n{ask!r}") from None
        finally:
            client.close()
            del self.player.plays[request_id], self.player.plays[next_id]

    def announce(self, script: Script, other: Script) -> tuple[str, Play]:
        """Have a request answered by `script`; its id, and what becomes of it."""
        request_id = f"r{next(self._numbers)}"
        play = self.player.plays[request_id] = Play(script, other)
        return request_id, play

    def _check_head(self, ask: Ask, seen: Seen, request_id: str) -> None:
        if not seen.status:
            return
        headers = seen.headers
        assert headers["x-request-id"] == request_id
        assert ask.version == "1.1" or "transfer-encoding" not in headers
        streamed = headers["content-type"] == "text/event-stream"
        assert ask.api.kserve or not streamed or headers["x-accel-buffering"] == "no"


def _hasty(script: Script) -> bool:
    """Whether it takes a timeout to bring the script to an end."""
    return script.ending is Ending.WAIT and not script.garbage and not ends(script)


def _told(what: str, script: Script, ask: Ask, seen: Seen, allowed: Sequence[object]) -> str:
    sent = f"sent {len(script.sent)} of {len(script.wire)} bytes, {len(script.delivered)} of the body"
    return f"{what}: {seen!r}\nfor {ask!r}\nof {script!r} ({sent})\nwhich allows {allowed!r}"


@contextlib.asynccontextmanager
async def running_matrix(hasty: TimeoutSpec = HASTY, send_buffer: int | None = None) -> AsyncIterator[Matrix]:
    """`send_buffer`: what the kernel may hold of an engine's, in bytes."""
    async with ScriptPlayer(send_buffer) as player, running_gateway(fleet(player, hasty)) as running:
        matrix = Matrix(player, running)
        watching = asyncio.create_task(matrix.watch())
        yield matrix
        watching.cancel()
