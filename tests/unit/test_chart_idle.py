"""The script that an engine's pod waits with until its requests have ended."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType

import pytest

from tests.helm import CHART

METRIC = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("idle", CHART / "files" / "idle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["EVERY_S"] = 0.02
    return module


@contextmanager
def engine(*running: int) -> Iterator[tuple[str, list[int]]]:
    """An engine's metrics, which say in turn that so many requests run; its URL, and what is left to be said."""
    left = list(running)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = left.pop(0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'# TYPE {METRIC} gauge\n{METRIC}{{engine="0",model_name="m"}} {now}.0\n'.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics", left
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_it_waits_until_nothing_runs_any_more(script: ModuleType) -> None:
    with engine(3, 1, 0, 7) as (url, left):
        script.wait(url, METRIC, 30, settle=0)
    assert left == [7]


def test_it_does_not_wait_for_an_engine_that_says_nothing(script: ModuleType) -> None:
    script.wait("http://127.0.0.1:1/metrics", METRIC, 30, settle=0)
    with engine(3, 3) as (url, left):
        script.wait(url, "another:metric", 30, settle=0)
    assert left == [3]


def test_it_waits_no_longer_than_it_may(script: ModuleType) -> None:
    begun = time.monotonic()
    with engine(*[1] * 1000) as (url, left):
        script.wait(url, METRIC, 0.2, settle=0)
    assert left
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f'{METRIC}{{engine="0"}} 1.0\n{METRIC}{{engine="1"}} 2\n', 3),
        (f"{METRIC} 4\n", 4),
        (f"{METRIC}_total 4\n# HELP {METRIC} {{}} 5\n", None),
    ],
)
def test_it_adds_up_the_series_of_its_metric_and_no_other(script: ModuleType, text: str, wanted: int | None) -> None:
    assert script.running(text, METRIC) == wanted
