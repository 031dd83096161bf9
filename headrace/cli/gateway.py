"""`headrace gateway`: run one gateway, of one process or of several, against engines and a Redis of one's own."""

import asyncio
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway.configuration import Origins, Setting
from gateway.listening import ListenError
from gateway.telemetry.log_file import unwritable
from headrace.config import ConfigError, LoadedFleet, load_fleet, read_again, report_warnings, size_text
from headrace.logs import configure_logging
from headrace.serving import Server, Stop, heed_hangups, serve
from headrace.settings import ADDRESSES
from headrace.version import headrace_version
from headrace.workers.slot import WorkerError
from headrace.workers.supervisor import Supervisor
from router.spec.gateway import OFF

MOST_WORKERS = 64

logger = logging.getLogger("headrace.gateway")


def gateway(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Option(
            "--config", "-c", metavar="FILE", help="The fleet file, or a folder of them.", envvar="HEADRACE_CONFIG"
        ),
    ],
    workers: Annotated[
        int, typer.Option("--workers", "-w", metavar="N", min=1, max=MOST_WORKERS, help="Processes that serve.")
    ] = 1,
) -> None:
    """Run one gateway of the fleet that FILE describes.

    It listens for clients on `gateway.http` (:8000, all interfaces) and for operators on `gateway.admin`
    (127.0.0.1:9090: /healthz, /readyz, /metrics and the admin API). Log lines go to standard error.

    One process uses one core. With --workers, N processes serve behind one address each of `http`, `grpc` and `admin`,
    under a supervisor that replaces one that ends.

    SIGTERM: /readyz says no and serving goes on until that has been noticed (gateway.drain.settle, 5 s), then no new
    connections, running streams finish (gateway.drain.grace, 5 minutes). SIGINT: the same without the first. A second
    signal cuts the streams.

    SIGHUP, or `headrace reload`: the fleet file is read again. With --workers, new processes take the place of those
    there are, with all of the file but its addresses and Redis, and as headrace is installed now; those finish their
    streams first. Without, pools, routes and tenants change. A file with mistakes changes nothing; the log says so.

    \b
    Environment:
      HEADRACE_REDIS_URL      instead of redis.url
      HEADRACE_HTTP           instead of gateway.http
      HEADRACE_ADMIN_LISTEN   instead of gateway.admin
      HEADRACE_GRPC           instead of gateway.grpc
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
    report_warnings(loaded)
    access_log = loaded.spec.gateway.access_log
    if access_log != OFF and (why := unwritable(access_log)) is not None:
        typer.echo(f"Cannot write the access log to {access_log} (gateway.access_log): {why}.", err=True)
        raise typer.Exit(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(loaded, workers, loaded.origins(*_said(context))))
        except ListenError as error:
            other = ADDRESSES.get(error.what)
            hint = f" Choose another address in the fleet file or with {other}." if other is not None else ""
            typer.echo(f"{error}{hint}", err=True)
            raise typer.Exit(1) from None
        except WorkerError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None


def _said(context: typer.Context) -> Iterator[Setting]:
    """What the command line says, as it may be shown."""
    for name, flag, variable in (("config", "--config", "HEADRACE_CONFIG"), ("workers", "--workers", None)):
        value = context.params[name]
        shown = value if isinstance(value, int) else str(value)
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "COMMANDLINE":
            yield Setting(path=name, value=shown, origin="flag", where=flag)
        elif source == "ENVIRONMENT":
            yield Setting(path=name, value=shown, origin="environment", where=variable)
        else:
            yield Setting(path=name, value=shown, origin="default")


async def _serve(loaded: LoadedFleet, workers: int, origins: Origins) -> None:
    server: Server
    again = partial(read_again, loaded.path)
    if workers == 1:
        from gateway.app import Gateway  # brings the gRPC stack, which a supervisor has no use for

        server = Gateway(
            loaded.spec, loaded.content_hash, loaded.settings.admin_token, read_again=again, origins=origins
        )
    else:
        server = Supervisor(loaded, workers, again, origins)
    stop = Stop()
    stop.heed_signals()
    heeding = asyncio.create_task(heed_hangups(server.reload), name="SIGHUP")
    try:
        await serve(server, stop)
    finally:
        heeding.cancel()
