"""The other sides: proxies and gateways that may be installed, each set up to do the same work as headrace.

nginx and HAProxy only pass bytes on, with one worker or thread: they are the yardstick. The gateways route by prompt
(`cache_aware`) where they can, with no cap on requests at once, and keep their defaults otherwise. `make bench-peers`
installs them into `.bench/`, a folder each; nginx and HAProxy are taken from the system where it has them. What is not
there is left out.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace.bench.relay.sides import answers, make_part
from headrace.bench.relay.stretches import MODEL
from headrace.local.part import Part
from headrace.local.parts import PACKAGE_ROOT
from headrace.local.ports import LOOPBACK, free_ports
from headrace.local.run_dir import RunDir

NGINX, HAPROXY, SMG = "nginx", "haproxy", "smg"
SGLANG_ROUTER, VLLM_ROUTER, PRODUCTION_STACK, LITELLM = "sglang_router", "vllm_router", "production_stack", "litellm"
BENCH_FOLDER: Final = PACKAGE_ROOT / ".bench"
_INSTALL: Final = "not installed: make bench-peers installs it"
_SYSTEM_FOLDERS: Final = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
"""Where proxies are that are not on the PATH of everybody."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer is to run."""

    run: RunDir
    engine: int
    port: int

    @property
    def engine_url(self) -> str:
        return f"http://{LOOPBACK}:{self.engine}"


@dataclass(frozen=True, slots=True)
class Peer:
    """One other side."""

    program: Callable[[], str | None]
    """Its program's path; None if it is not installed."""
    options: Callable[[Place], tuple[str, ...]]
    """Its arguments; writes its configuration into the run's folder if it needs one."""
    missing: str = _INSTALL
    env: tuple[tuple[str, str], ...] = ()
    slow: bool = False
    """Ten times dearer than the others: measured with a tenth of the connections, so that it ends in time."""


def peer_part(name: str, place: Place) -> Part | None:
    """The part for a peer, None if it is not installed."""
    peer = PEERS[name]
    program = peer.program()
    if program is None:
        return None
    command = (program, *peer.options(place))
    return make_part(place.run, name, command, place.port, answers(place.port, MODEL), **dict(peer.env))


def _from_debian(name: str) -> Callable[[], str | None]:
    unpacked = BENCH_FOLDER / "debian" / "usr" / "sbin"
    return lambda: shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", ""), _SYSTEM_FOLDERS, str(unpacked)])
    )


def _from_venv(folder: str, name: str) -> Callable[[], str | None]:
    return lambda: shutil.which(name, path=str(BENCH_FOLDER / folder / "bin"))


_NGINX_CONF: Final = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
{user}
events {{ worker_connections 65536; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  client_max_body_size 32m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen {listen} backlog=16384;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""

_HAPROXY_CFG: Final = """\
global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  http-reuse always
  option http-no-delay
frontend clients
  bind {listen} backlog 16384
  default_backend engine
backend engine
  server engine {engine}
"""

_LITELLM_YAML: Final = """\
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "{engine}/v1", api_key: none}}
"""


def _nginx(place: Place) -> tuple[str, ...]:
    user = "user root;" if os.geteuid() == 0 else ""  # who may then write the folders above
    text = _NGINX_CONF.format(
        folder=place.run.path, user=user, engine=f"{LOOPBACK}:{place.engine}", listen=f"{LOOPBACK}:{place.port}"
    )
    return "-p", str(place.run.path), "-e", "stderr", "-c", _write(place, "nginx.conf", text)


def _haproxy(place: Place) -> tuple[str, ...]:
    text = _HAPROXY_CFG.format(engine=f"{LOOPBACK}:{place.engine}", listen=f"{LOOPBACK}:{place.port}")
    return "-db", "-f", _write(place, "haproxy.cfg", text)


def _rust_gateway(*more: str) -> Callable[[Place], tuple[str, ...]]:
    """SMG, and two that share its ancestor's options."""

    def options(place: Place) -> tuple[str, ...]:
        (metrics,) = free_ports(1, taken=[place.port])
        return (
            *more,
            *("--host", LOOPBACK, "--port", str(place.port), "--worker-urls", place.engine_url),
            *("--policy", "cache_aware", "--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics)),
        )

    return options


def _production_stack(place: Place) -> tuple[str, ...]:
    return (
        *("--host", LOOPBACK, "--port", str(place.port), "--service-discovery", "static"),
        *("--static-backends", place.engine_url, "--static-models", MODEL, "--routing-logic", "roundrobin"),
    )


def _litellm(place: Place) -> tuple[str, ...]:
    text = _LITELLM_YAML.format(model=MODEL, engine=place.engine_url)
    return "--host", LOOPBACK, "--port", str(place.port), "--config", _write(place, "litellm.yaml", text)


def _write(place: Place, name: str, text: str) -> str:
    path = place.run.path / name
    path.write_text(text)
    return str(path)


_DEBIAN_LIBRARIES: Final = (
    ("LD_LIBRARY_PATH", str(BENCH_FOLDER / "debian" / "usr" / "lib" / f"{os.uname().machine}-linux-gnu")),
)
_LEAN: Final = ("--log-level", "warn", "--history-backend", "none", "--max-concurrent-requests", "-1")
PEERS: Final = {
    NGINX: Peer(_from_debian("nginx"), _nginx, env=_DEBIAN_LIBRARIES),
    HAPROXY: Peer(_from_debian("haproxy"), _haproxy, env=_DEBIAN_LIBRARIES),
    SMG: Peer(_from_venv("smg", "smg"), _rust_gateway("launch", *_LEAN)),
    SGLANG_ROUTER: Peer(_from_venv("sglang-router", "sglang-router"), _rust_gateway("launch", *_LEAN)),
    VLLM_ROUTER: Peer(_from_venv("vllm-router", "vllm-router"), _rust_gateway("--log-level", "warning")),
    PRODUCTION_STACK: Peer(
        _from_venv("production-stack", "vllm-router"),
        _production_stack,
        missing="not installed: no package index has it; install its src/vllm_router into .bench/production-stack",
        slow=True,
    ),
    LITELLM: Peer(
        _from_venv("litellm", "litellm"),
        _litellm,
        env=(
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),  # it would fetch one otherwise
            ("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"),  # it listens on loopback only
        ),
        slow=True,
    ),
}
