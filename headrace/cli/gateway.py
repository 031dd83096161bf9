"""`headrace gateway`: run one gateway process against engines and a Redis of one's own."""

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway.app import Gateway
from gateway.listening import ListenError
from headrace.config import ConfigError, LoadedFleet, load_fleet, size_text
from headrace.logs import configure_logging
from headrace.settings import ADDRESSES
from headrace.version import headrace_version

_COLLECT_EVERY = 20_000
"""Objects made and not freed before the youngest are looked at (CPython's default: 700)."""

logger = logging.getLogger("headrace.gateway")


def gateway(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The fleet file.", envvar="HEADRACE_CONFIG")
    ],
) -> None:
    """Run one gateway of the fleet that FILE describes.

    It listens for clients on `gateway.http` (:8000, all interfaces) and for operators on `gateway.admin`
    (127.0.0.1:9090: /healthz, /readyz, /metrics and the admin API). Log lines go to standard error.

    SIGTERM or SIGINT: no new connections, running streams finish, up to five minutes; a second signal cuts them.

    \b
    Environment:
      HEADRACE_REDIS_URL      instead of redis.url
      HEADRACE_HTTP           instead of gateway.http
      HEADRACE_ADMIN_LISTEN   instead of gateway.admin
      HEADRACE_GRPC           instead of gateway.grpc (reserved)
      HEADRACE_ADMIN_TOKEN    the token the admin API asks for
      HEADRACE_LOG_LEVEL      debug, info (default), warning, error
      HEADRACE_LOG_FORMAT     text (default), json

    \b
    Example:
      headrace gateway --config fleet.yaml
    """
    try:
        loaded = load_fleet(config, os.environ)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    logger.info(
        "headrace %s: fleet %s from %s: %s; %s Redis",
        *(headrace_version(), loaded.spec.fleet, loaded.path, size_text(loaded.size)),
        "with" if loaded.spec.redis is not None else "without",
    )
    for warning in loaded.warnings:
        logger.warning("%s", warning.render(str(loaded.path)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(loaded))
        except ListenError as error:
            typer.echo(f"{error} Choose another address in the fleet file or with {ADDRESSES[error.what]}.", err=True)
            raise typer.Exit(1) from None


def _spare_the_collector() -> None:
    """Everything that is there when serving begins stays: the garbage collector need not look at it again. What
    requests leave behind is freed by counting references, but for rare cycles: those may gather a little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 20)


async def _serve(loaded: LoadedFleet) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops without waiting for streams."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    server = Gateway(loaded.spec, loaded.content_hash, loaded.settings.admin_token)
    drain: asyncio.Task[None] | None = None

    def stop() -> None:
        if stopping.is_set() and drain is not None:
            logger.warning("told to stop again: not waiting for streams any longer")
            drain.cancel()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.start()
        _spare_the_collector()
        await stopping.wait()
        logger.info("stopping: no new connections, waiting for streams to finish")
    finally:
        drain = asyncio.create_task(server.stop())
        await asyncio.wait([drain])
        if not drain.cancelled():
            drain.result()
