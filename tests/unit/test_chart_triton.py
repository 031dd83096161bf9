"""The script that the chart starts Triton with, which runs in Triton's own image."""

import importlib.util
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from tests.helm import CHART


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_launch", CHART / "files" / "triton.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PARAMETERS = {"triton_max_batch_size": 64, "batching_strategy": "inflight_fused_batching", "decoupled_mode": True,
              "enable_kv_cache_reuse": True, "kv_cache_free_gpu_mem_fraction": 0.9}  # fmt: skip

AS_PUBLISHED = """\
max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
parameters: { key: "gpt_model_type" value: { string_value: "${batching_strategy}" } }
parameters: { key: "enable_kv_cache_reuse" value: { string_value: "${enable_kv_cache_reuse}" } }
parameters: { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "${kv_cache_free_gpu_mem_fraction}" } }
parameters: { key: "sink_token_length" value: { string_value: "${sink_token_length}" } }
"""
FILLED_IN = """\
max_batch_size: 8
model_transaction_policy { decoupled: False }
parameters: { key: "gpt_model_type" value: { string_value: "V1" } }
parameters: {
  key: "enable_kv_cache_reuse"
  value: { string_value: "False" }
}
parameters: { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "" } }
parameters: { key: "sink_token_length" value: { string_value: "${sink_token_length}" } }
"""


@pytest.mark.parametrize("text", [AS_PUBLISHED, FILLED_IN], ids=["as_published", "filled_in"])
def test_a_configuration_gets_the_parameters_whether_it_is_a_template_or_filled_in(
    script: ModuleType, text: str
) -> None:
    made = script.configured(text, PARAMETERS, engine=True)
    assert "max_batch_size: 64\n" in made
    assert "decoupled: true" in made
    for value in ('"inflight_fused_batching"', '"true"', '"0.9"', '"${sink_token_length}"'):
        assert f"string_value: {value}" in made
    assert '"V1"' not in made


def test_other_models_have_their_placeholders_filled_in_and_their_own_parameters(script: ModuleType) -> None:
    text = (
        'max_batch_size: 8\nparameters: {key: "enable_kv_cache_reuse" value: {string_value: "x"}}\n${decoupled_mode}\n'
    )
    made = script.configured(text, PARAMETERS, engine=False)
    assert made == 'max_batch_size: 64\nparameters: {key: "enable_kv_cache_reuse" value: {string_value: "x"}}\ntrue\n'


def test_a_model_without_batches_stays_one(script: ModuleType) -> None:
    assert script.configured("max_batch_size: 0\n", PARAMETERS, engine=True) == "max_batch_size: 0\n"


def test_the_repository_is_copied_as_links_and_stays_as_it_is(script: ModuleType, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "made" / "copy"
    (source / "tensorrt_llm" / "1").mkdir(parents=True)
    (source / "tensorrt_llm" / "config.pbtxt").write_text(AS_PUBLISHED)
    (source / "tensorrt_llm" / "1" / "rank0.engine").write_bytes(b"weights")
    for _ in range(2):  # a container that starts again finds what it left
        script.copy_repository(source, copy, PARAMETERS)
    assert (copy / "tensorrt_llm" / "1").is_symlink()
    assert (copy / "tensorrt_llm" / "1" / "rank0.engine").read_bytes() == b"weights"
    assert "max_batch_size: 64" in (copy / "tensorrt_llm" / "config.pbtxt").read_text()
    assert (source / "tensorrt_llm" / "config.pbtxt").read_text() == AS_PUBLISHED


def test_one_rank_answers_and_the_others_only_load_the_engine(script: ModuleType) -> None:
    options = Namespace(exit_timeout=300, http_port=8000)
    first, other = script.server_command(0, options), script.server_command(3, options)
    assert "--http-port=8000" in first
    assert "--grpc-port=8001" in first
    assert "--model-control-mode=explicit" not in first
    assert {"--allow-http=false", "--allow-grpc=false", "--allow-metrics=false", "--load-model=tensorrt_llm"} < {*other}


def test_a_group_is_reached_by_names_that_follow_from_its_leaders(script: ModuleType) -> None:
    workers = script.group("llm-0.llm.ai", 3)
    assert workers == ["llm-0-1.llm.ai", "llm-0-2.llm.ai"]
    options = Namespace(exit_timeout=300, ranks=24, nodes=3)
    command = script.mpi_command("/usr/bin/mpirun", "triton.py", ["--ranks=24"], options, workers)
    hosts = command[command.index("--host") + 1].split(",")
    assert [host.rpartition(":")[2] for host in hosts] == ["8", "8", "8"]
    assert hosts[1:] == ["llm-0-1.llm.ai:8", "llm-0-2.llm.ai:8"]
    assert command[-2:] == ["rank", "--ranks=24"]
    alone = script.mpi_command("/usr/bin/mpirun", "triton.py", [], Namespace(exit_timeout=1, ranks=4, nodes=1), [])
    assert "--host" not in alone
    assert "StrictHostKeyChecking=yes" in command[command.index("plm_rsh_agent") + 1]
    assert alone[1:3] == ["-np", "4"]


MPIRUN = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), sys.exit(1)))
open(sys.argv[2], "w").write(str(rank.pid))
rank.wait()
time.sleep(60)  # the other ranks do not end by themselves
"""
FINISHING = """
import signal, sys, time
def finish(*_):
    time.sleep(0.3)
    open({told!r}, "w").write("finished")
    sys.exit()
signal.signal(signal.SIGTERM, finish)
open({up!r}, "w").close()
time.sleep(60)
"""


def test_told_to_stop_the_first_rank_finishes_before_the_others_are_ended(script: ModuleType, tmp_path: Path) -> None:
    up, told, first = (str(tmp_path / name) for name in ("up", "told", "first"))
    vars(script)["FIRST_RANK"] = Path(first)

    def stop() -> None:
        while not Path(up).exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        assert script.run([sys.executable, "-c", MPIRUN, FINISHING.format(told=told, up=up), first], 30) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        stopping.join()
    assert Path(told).read_text() == "finished"


def test_ranks_that_fail_end_the_pod(script: ModuleType, tmp_path: Path) -> None:
    vars(script)["FIRST_RANK"] = tmp_path / "first"
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert script.run([sys.executable, "-c", "raise SystemExit(3)"], 30) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
