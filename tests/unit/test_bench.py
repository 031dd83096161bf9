"""The frame of `headrace bench`: which figures are measured, how rounds become numbers, and what is written."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from headrace.bench import run
from headrace.bench.catalogue import NAMES, find_bench
from headrace.bench.figures import BenchError, Figure, Measured, Plan, choose, summarize
from headrace.bench.usage import ProcessTree
from headrace.cli.main import app

FIGURES = (Figure("us_per_call"), Figure("cpu_vs_bare", bar=1.3), Figure("never_measured_us"))
ROUNDS = {"us_per_call": [30.0, 10.0, 20.0], "cpu_vs_bare": [1.25, 1.5, 1.0]}


class FakeBench:
    """A bench without processes: the real one is run in tests/unit/test_bench_kserve.py."""

    FIGURES: Sequence[Figure] = FIGURES

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.waits = False

    async def measure(self, plan: Plan, err: Console) -> Measured:
        self.plans.append(plan)
        if self.waits:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        return Measured(ROUNDS, {"calls": 7}, {"peer": "make bench-peers installs it"})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    monkeypatch.setattr(run, "find_bench", lambda _: fake)
    return fake


def _run(folder: Path, figures: str | None = None) -> tuple[int, str]:
    err = io.StringIO()
    console = Console(file=err, width=200)
    json_file, plots = folder / "out.json", folder / "plots"
    status = run.run_bench("fake", figures, quick=True, json_file=json_file, plot_folder=plots, err=console)
    return status, err.getvalue()


def test_the_json_has_medians_under_stable_names(bench: FakeBench, tmp_path: Path) -> None:
    assert _run(tmp_path)[0] == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["bench", "git", "machine", "versions", "settings", "figures"]
    assert written["figures"] == {"us_per_call": 20.0, "cpu_vs_bare": 1.25}
    assert written["settings"] == {
        "quick": True,
        "calls": 7,
        "left_out": {"peer": "make bench-peers installs it"},
    }
    assert {"headrace", "grpcio", "python"} <= set(written["versions"])
    assert written["machine"]["cores"] >= 1


def test_the_table_shows_the_spread_the_bar_and_what_was_left_out(bench: FakeBench, tmp_path: Path) -> None:
    shown = _run(tmp_path)[1]
    row = next(line.split() for line in shown.splitlines() if line.startswith("cpu_vs_bare"))
    assert row == ["cpu_vs_bare", "1.25", "1", "1.5", "<=", "1.3"]
    assert "left out: peer: make bench-peers installs it" in shown
    assert "never_measured_us" not in shown


def test_only_the_figures_asked_for_are_measured_and_reported(bench: FakeBench, tmp_path: Path) -> None:
    _run(tmp_path, "cpu_vs_bare")
    assert bench.plans == [Plan(frozenset({"cpu_vs_bare"}), quick=True)]
    assert list(json.loads((tmp_path / "out.json").read_text())["figures"]) == ["cpu_vs_bare"]


def test_the_plot_has_a_row_for_each_figure(bench: FakeBench, tmp_path: Path) -> None:
    _run(tmp_path)
    drawn = ElementTree.parse(tmp_path / "plots" / "fake.svg")
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[1::2] == ["us_per_call", "cpu_vs_bare"]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 2


def test_a_signal_ends_a_bench_with_its_own_status(bench: FakeBench, tmp_path: Path) -> None:
    bench.waits = True
    status, shown = _run(tmp_path)
    assert status == run.INTERRUPTED
    assert "ended by SIGTERM" in shown
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("asked", ["us_per_cal", "", " , ", "us_per_call,nothing"])
def test_an_unknown_figure_is_answered_with_those_that_exist(asked: str) -> None:
    with pytest.raises(BenchError, match="choose from us_per_call, cpu_vs_bare, never_measured_us"):
        choose(FIGURES, asked)


def test_an_unknown_bench_is_answered_with_those_that_exist() -> None:
    result = CliRunner().invoke(app, ["bench", "grcp"])
    assert result.exit_code == 2
    assert "no bench 'grcp': choose from grpc" in result.output


def test_an_unwritable_file_is_one_sentence(bench: FakeBench, tmp_path: Path) -> None:
    (tmp_path / "out.json").mkdir()
    with pytest.raises(BenchError, match="cannot write"):
        _run(tmp_path)


def test_names_of_figures_are_unique_and_name_their_unit() -> None:
    for name in NAMES:
        names = [figure.name for figure in find_bench(name).FIGURES]
        assert len(set(names)) == len(names)
        for figure in names:
            assert {"us", "ms", "kb", "vs", "held", "part"} & set(figure.split("_")), figure


def test_a_bar_may_be_the_least_that_is_enough() -> None:
    held = Figure("held_streams", bar=10, at_least=True)
    within = {
        number: summarize([held], {held.name}, Measured({held.name: [number]}, {}))[0].within_bar
        for number in (9, 10, 11)
    }
    assert within == {9: False, 10: True, 11: True}


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_a_median_lies_within_its_spread(numbers: list[float]) -> None:
    (summary,) = summarize(FIGURES[:1], {"us_per_call"}, Measured({"us_per_call": numbers}, {}))
    assert summary.smallest <= summary.median <= summary.largest
    assert summary.rounds == len(numbers)


_BUSY_CHILD = """
import subprocess, sys, time
child = "import time\\nwhile time.process_time() < 0.3: pass\\nprint('done', flush=True)\\ntime.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""
_GROWS = "import sys\nsys.stdin.readline()\nbytearray(64 << 20)\nprint('grown', flush=True)\nsys.stdin.readline()"


def test_cpu_time_of_children_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", _BUSY_CHILD], stdout=subprocess.PIPE, start_new_session=True) as root:
        try:
            assert root.stdout is not None
            assert root.stdout.readline() == b"done\n"
            assert ProcessTree(root.pid).cpu_seconds() >= 0.3
        finally:
            os.killpg(root.pid, signal.SIGKILL)


@pytest.mark.parametrize("permitted", [True, False])
def test_a_peak_is_seen_though_the_memory_is_given_back(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        monkeypatch.setattr(ProcessTree, "_reset_peak", lambda _: False)
    # Sampling needs memory to stay for a while to see it; the kernel's mark does not.
    program = _GROWS if permitted else _GROWS.replace("bytearray(64 << 20)", "kept = bytearray(64 << 20)")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as grown:
        assert grown.stdin is not None and grown.stdout is not None
        tree = ProcessTree(grown.pid)
        before = tree.rss_bytes()
        with tree.peak_rss() as peak:
            grown.stdin.write(b"\n")
            grown.stdin.flush()
            assert grown.stdout.readline() == b"grown\n"
            if not permitted:
                until = time.monotonic() + 10
                while peak.bytes - before < 60 << 20 and time.monotonic() < until:
                    time.sleep(0.01)
        assert peak.bytes - before > 60 << 20
        grown.stdin.close()
