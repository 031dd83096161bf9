"""`headrace discovery`: find a fleet's engines in a Kubernetes cluster and tell its gateways."""

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from aiohttp import web

from headrace.config import ConfigError, load_pools
from headrace.logs import configure_logging
from headrace.version import headrace_version
from k8s.api import KubernetesApi, NoClusterError
from k8s.discovery import Discovery
from k8s.status_page import status_page
from router.spec.documents import file_documents
from router.spec.fleet import FleetSpec
from router.spec.units import host_and_port

DEFAULT_LISTEN = ":9091"

logger = logging.getLogger("headrace.discovery")


def discovery(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The fleet file.", envvar="HEADRACE_CONFIG")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where pools look that name none, and the lease is. Default: where it runs."),
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A kubeconfig. Default: the pod's service account.")
    ] = None,
    context: Annotated[str | None, typer.Option(metavar="NAME", help="The kubeconfig's context.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where /healthz, /readyz and /metrics are.")
    ] = DEFAULT_LISTEN,
) -> None:
    """Find engines in a Kubernetes cluster and publish them to the fleet's gateways.

    Which pods are endpoints is said by `discover` of a pool. The pools are those in the fleet's Redis, which gateways
    publish from their fleet files; of FILE, fleet and redis count, and its pools until Redis has others.

    Run two: both follow the cluster, the one that holds the Lease headrace-FLEET publishes. SIGTERM and SIGINT end it
    and leave the published endpoints as they are.

    \b
    Example:
      headrace discovery --config fleet.yaml --namespace inference
    """
    try:
        spec, settings = load_pools(config, os.environ)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if spec.redis is None:
        typer.echo(f"{config}: no `redis`, so gateways could not be told what is discovered; add it.", err=True)
        raise typer.Exit(1)
    configure_logging(settings.log_level, settings.log_format)
    try:
        host, port = host_and_port(listen)
        if not 0 <= port < 65536:
            raise ValueError(port)
    except ValueError:
        typer.echo(f"--listen {listen}: must be HOST:PORT, or :PORT for every interface.", err=True)
        raise typer.Exit(1) from None
    logger.info("headrace %s: discovery for fleet %s", headrace_version(), spec.fleet)
    try:
        asyncio.run(_run(spec, spec.redis.url, namespace, kubeconfig, context, host, port))
    except (NoClusterError, _ListenError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


class _ListenError(Exception):
    """Why nothing can listen at an address; one sentence for people."""


async def _run(
    spec: FleetSpec, redis_url: str, namespace: str | None, kubeconfig: Path | None, context: str | None,
    host: str | None, port: int,
) -> None:  # fmt: skip
    async with AsyncExitStack() as stack:
        api = await KubernetesApi.connect(kubeconfig, context)
        stack.push_async_callback(api.close)
        one = Discovery(
            api, namespace or api.namespace, lease_name(spec.fleet), f"{socket.gethostname()}_{secrets.token_hex(4)}",
            redis_url, spec.fleet, file_documents(spec, content_hash=""),
        )  # fmt: skip
        runner = web.AppRunner(status_page(one), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise _ListenError(f"Cannot listen on {host or ''}:{port} (--listen): {error.strerror}.") from None
        working = asyncio.create_task(one.run(), name="discovery")
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_, working.cancel)
        await asyncio.wait([working])
        if not working.cancelled():
            working.result()
        logger.info("discovery has ended; what it published stays")


def lease_name(fleet: str) -> str:
    """The name of a fleet's lease, which has to be a DNS name."""
    return f"headrace-{re.sub('[^a-z0-9.-]', '-', fleet.lower()).strip('-.')}"
