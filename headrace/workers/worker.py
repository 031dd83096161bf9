"""In a worker's process: one gateway that is told what to serve, and when to stop, over its channel.

When the channel's other end closes, the supervisor is gone without having drained: nobody could stop or watch this
process any more, and whoever starts the gateway anew wants its ports. So it ends at once, and its streams with an error
event.
"""

import asyncio
import os
import socket
import sys

import msgspec
import uvloop

from gateway.app import Gateway, Inherited
from gateway.http.fair_share import FairShare
from gateway.listening import ListenError
from headrace.logs import configure_logging
from headrace.serving import Stop, serve
from headrace.workers.channel import (
    REPORT_EVERY_S,
    Answer,
    CancelRequest,
    Channel,
    ChannelClosedError,
    EndpointReport,
    Failed,
    ListRequests,
    Report,
    SetLogLevel,
    Settle,
    Start,
)
from router.spec.documents import Document


def main(descriptor: int) -> None:
    """Be the worker whose end of the channel is `descriptor`."""
    end = _inherited(descriptor)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_work(end)))


def _inherited(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


async def _work(end: socket.socket) -> int:
    """Serve as told; the exit status."""
    channel = await Channel.over(end)
    try:
        start = await channel.receive()
    except ChannelClosedError:
        return 1
    if not isinstance(start, Start):
        return 1
    configure_logging(start.log_level, start.log_format, start.number)
    inherited = Inherited(
        [_inherited(one) for one in start.http],
        msgspec.json.decode(start.documents, type=list[Document]),
        start.workers,
        FairShare(start.counts, start.place, start.workers),
    )
    gateway = Gateway(start.spec, "", None, inherited)
    for name, level in start.log_levels.items():
        gateway.set_log_level(name, level)
    stop = Stop()
    talking = [
        asyncio.create_task(_obey(channel, gateway, stop)),
        asyncio.create_task(_keep_reporting(channel, gateway)),
    ]
    try:
        await serve(gateway, stop)
        channel.send(_report(gateway))  # what the last requests added to the counters
    except ListenError as error:
        channel.send(Failed(error.what, str(error)))
        return 1
    finally:
        for task in talking:
            task.cancel()
        await asyncio.wait(talking)
        await channel.close()
    return 0


async def _obey(channel: Channel, gateway: Gateway, stop: Stop) -> None:
    try:
        while True:
            message = await channel.receive()
            if isinstance(message, Settle):  # for how long is the supervisor's to know
                gateway.begin_drain(accepting=message.accepting)
            elif isinstance(message, ListRequests):
                listed = await gateway.list_requests(message.wanted)
                channel.send(Answer(question=message.question, listed=listed))
            elif isinstance(message, CancelRequest):
                cancelled = await gateway.cancel_request(message.id)
                channel.send(Answer(question=message.question, cancelled=cancelled))
            elif isinstance(message, SetLogLevel):
                gateway.set_log_level(message.name, message.level)
            else:
                stop.ask(settle=False)
    except ChannelClosedError:
        stop.ask(settle=False)
        stop.ask()


async def _keep_reporting(channel: Channel, gateway: Gateway) -> None:
    try:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if gateway.lifecycle != "starting":
                channel.send(_report(gateway))
                await channel.sent()
    except ChannelClosedError:
        pass  # `_obey` sees it, too


def _report(gateway: Gateway) -> Report:
    return Report(
        serving=gateway.lifecycle == "serving",
        live_requests=gateway.live_requests,
        cut=gateway.cut,
        redis_connected=gateway.redis_connected(),
        endpoints={
            endpoint.id: EndpointReport(
                endpoint.phase, endpoint.detail, endpoint.state.in_flight, gateway.drained(endpoint)
            )
            for endpoint in gateway.fleet.endpoints.values()
        },
        queues=gateway.queues(),
        rows=gateway.rows(),
        examples=gateway.examples(),
        degraded=gateway.degraded(),
    )
