"""Alerts and dashboard: every expression is one that Prometheus reads, about metrics that a gateway has, and every
alert fires for what it is about and stops when that is over."""

import inspect
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.metrics_reference import page
from k8s import status_page
from tests.helm import CHART, ROOT

RULES = CHART / "files" / "alerts.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
PROMTOOL = shutil.which(
    "promtool", path=os.pathsep.join([os.environ.get("PATH", ""), str(ROOT / ".bench" / "debian" / "usr" / "bin")])
)
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool (Debian: prometheus): make promtool unpacks it into .bench"
)
NAME = re.compile(r"\b(?:headrace|process)_\w+")


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]


def exposed() -> set[str]:
    """Names of the series of a gateway's `/metrics`, and of discovery's."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", page(), re.MULTILINE)
    rows += [(name, "") for name in re.findall(r'"(headrace_discovery_\w+)"', inspect.getsource(status_page))]
    return {
        name + end for name, kind in rows for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }


def test_alerts_and_panels_are_about_metrics_that_there_are() -> None:
    expressions = [*((name, rule["expr"]) for name, rule in alerts().items()), *panels()]
    for name, expression in expressions:
        used = set(NAME.findall(expression))
        assert used, name
        assert used <= exposed(), name


def test_every_alert_has_its_page_in_the_runbook_and_no_page_is_of_none() -> None:
    headings = re.findall(r"^## (Headrace\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert headings == list(alerts())
    for text in RUNBOOK.read_text().split("\n## Headrace")[1:]:
        for part in ("**Meaning.**", "**Check.**", "**Remedy.**"):
            assert part in text, text.splitlines()[0]


def series(**values: str) -> list[dict[str, str]]:
    """Samples a minute apart, in promtool's words."""
    return [{"series": name, "values": value} for name, value in values.items()]


DOWN = "0x60"
BURST = "0+60x30 1800x60"
"""A counter that grows by one a second for half an hour, then no more."""
STEADY = "0+60x90"
BAD_THEN_GOOD, GOOD_AFTER = "0x39 1x60", "1x39 0x60"

CASES: dict[str, tuple[dict[str, str], int, int, dict[str, str]]] = {
    "HeadraceGone": ({'headrace_live_requests{instance="a"}': "_x39 1x60"}, 30, 50, {}),
    "HeadracePoolDown": (
        {'headrace_endpoint_phase{pool="p", endpoint="e", phase="ready"}': BAD_THEN_GOOD},
        10,
        50,
        {"pool": "p"},
    ),
    "HeadraceEndpointUnhealthy": (
        {'headrace_endpoint_phase{pool="p", endpoint="e", phase="unhealthy"}': GOOD_AFTER},
        20,
        50,
        {"pool": "p", "endpoint": "e"},
    ),
    "HeadraceEndpointEjected": ({'headrace_ejections_total{endpoint="e"}': "0+1x20 20x60"}, 15, 60, {"endpoint": "e"}),
    "HeadraceErrors": (
        {
            'headrace_requests_total{route="r", status="502"}': BURST,
            'headrace_requests_total{route="r", status="200"}': STEADY,
        },
        20,
        60,
        {"route": "r"},
    ),
    "HeadraceNoCapacity": (
        {
            'headrace_requests_total{route="r", status="503"}': BURST,
            'headrace_requests_total{route="r", status="200"}': STEADY,
        },
        20,
        60,
        {"route": "r"},
    ),
    "HeadraceQueueWait": (
        {
            'headrace_queue_wait_seconds_bucket{route="r", le="10"}': DOWN,
            'headrace_queue_wait_seconds_bucket{route="r", le="30"}': BURST,
            'headrace_queue_wait_seconds_bucket{route="r", le="+Inf"}': BURST,
        },
        20,
        60,
        {"route": "r"},
    ),
    "HeadraceSlowFirstToken": (
        {
            'headrace_time_to_first_token_seconds_bucket{route="r", le="10"}': DOWN,
            'headrace_time_to_first_token_seconds_bucket{route="r", le="30"}': BURST,
            'headrace_time_to_first_token_seconds_bucket{route="r", le="+Inf"}': BURST,
        },
        25,
        70,
        {"route": "r"},
    ),
    "HeadraceRedisLost": ({'headrace_redis_connected{instance="a"}': BAD_THEN_GOOD}, 10, 50, {"instance": "a"}),
    "HeadraceFileDiffers": ({'headrace_file_differs{instance="a"}': GOOD_AFTER}, 35, 50, {"instance": "a"}),
    "HeadraceNoDiscovery": ({'headrace_discovery_degraded{instance="a"}': GOOD_AFTER}, 10, 50, {}),
    "HeadraceDiscoveryStale": (
        {'headrace_discovery_stale_seconds{instance="a", objects="pods"}': "90x39 0x60"},
        10,
        50,
        {"objects": "pods"},
    ),
    "HeadraceOverloaded": (
        {'headrace_overload_seconds_total{instance="a", measure="refuse"}': BURST},
        20,
        60,
        {"instance": "a"},
    ),
    "HeadraceWorkersMissing": (
        {'headrace_workers_serving{instance="a"}': "3x39 4x60", 'headrace_workers{instance="a"}': "4x100"},
        20,
        50,
        {"instance": "a"},
    ),
    "HeadraceWorkersRestart": (
        {'headrace_worker_restarts_total{instance="a"}': "0+1x20 20x60"},
        20,
        70,
        {"instance": "a"},
    ),
    "HeadraceRetriesSpent": ({'headrace_retries_refused_total{route="r"}': BURST}, 20, 60, {"route": "r"}),
    "HeadraceIssuerAway": (
        {
            'headrace_jwks_fetches_total{issuer="i", outcome="failed"}': "0+1x39 39x60",
            'headrace_jwks_fetches_total{issuer="i", outcome="ok"}': "0x39 0+1x60",
        },
        30,
        50,
        {"issuer": "i"},
    ),
    "HeadraceLimitsAlone": (
        {'headrace_lease_asks_total{instance="a", outcome="failed"}': BURST},
        20,
        60,
        {"instance": "a"},
    ),
    "HeadraceTelemetryLost": ({'headrace_access_log_dropped_total{instance="a"}': BURST}, 25, 60, {"instance": "a"}),
}
"""By alert: the series, a minute at which it fires, one at which it does not any more, and its labels."""


@needs_promtool
def test_every_alert_fires_for_what_it_is_about_and_stops_when_that_is_over(tmp_path: Path) -> None:
    rules = alerts()
    assert list(CASES) == list(rules)
    tests = []
    for name, (samples, fires, over, labels) in CASES.items():
        alert = {"exp_labels": {**labels, **rules[name]["labels"]}}
        tests.append({
            "interval": "1m",
            "input_series": series(**samples),
            "alert_rule_test": [
                {"eval_time": f"{fires}m", "alertname": name, "exp_alerts": [alert]},
                {"eval_time": f"{over}m", "alertname": name, "exp_alerts": []},
            ],
        })  # fmt: skip
    # What a person is told is not compared: only who is told of.
    told = yaml.safe_load(RULES.read_text())
    for rule in told["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(told))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_reads_every_rule_and_every_panel(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {"$__rate_interval": "5m", "$route": ".*"}
    rules = []
    for number, (_, expression) in enumerate(panels()):
        for variable, value in shown.items():
            expression = expression.replace(variable, value)
        rules.append({"record": f"panel:{number}", "expr": expression})
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", str(tmp_path / "panels.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
