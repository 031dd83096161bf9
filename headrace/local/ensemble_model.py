"""The Python-backend model inside the embedded Triton: reads tensors, answers with tensors, exports the metrics.

Triton runs this in its own stub process. `execute` only checks a request and queues it; the slots of the scheduler do
the work and answer through the request's response sender, which is what a decoupled model is for. One more thread
wakes ten times a second, as often as TensorRT-LLM's own statistics: it looks for cancels among the waiting requests
and writes the metrics.

The stub must not outlive Triton. Triton starts it from a thread that ends after loading, so the kernel's parent-death
signal would come too early; a thread waiting on a process handle of Triton ends the stub instead. Triton may even be
gone before this module is reached; its process id is known nevertheless, because it leads the session.
"""

import json
import os
import select
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # provided by Triton's stub only

from headrace.local.ensemble_generation import run_job
from headrace.local.ensemble_metrics import Metrics
from headrace.local.ensemble_request import EnsembleRequest, UnsupportedInputError, parse_request
from headrace.local.ensemble_scheduler import Job, Scheduler, Usage
from headrace.local.ensemble_signature import INPUTS
from headrace.local.llm import SLOTS, engine_params

TICK_S = 0.1
DRAIN_S = 2.0
"""Triton unloads a model when its requests have ended; their slots may need a moment more."""


class TritonPythonModel:
    """Triton's interface: `initialize`, `execute`, `finalize`."""

    def initialize(self, args: dict[str, str]) -> None:
        _die_with_triton()
        import xllamacpp

        parameters = json.loads(args["model_config"])["parameters"]
        Path(parameters["pid_file"]["string_value"]).write_text(str(os.getpid()))
        engine = xllamacpp.Server(engine_params(Path(parameters["weights"]["string_value"])))
        self._address: str = engine.listening_address
        self._scheduler = Scheduler(lambda job, seen: run_job(engine.handle_completions, job, seen), SLOTS)
        self._metrics = Metrics(pb_utils, model=args["model_name"], version=args["model_version"])
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            client = _TensorClient(request)
            try:
                parsed = parse_request(_read_inputs(request), self._tokenize)
            except UnsupportedInputError as error:
                self._scheduler.refuse(client, str(error), invalid=True)
            except Exception as error:  # an engine that cannot tokenize must not leave the client waiting
                self._scheduler.refuse(client, f"request not understood: {error}", invalid=False)
            else:
                client.request = parsed
                self._scheduler.submit(Job(parsed, client))

    def finalize(self) -> None:
        self._scheduler.drained(DRAIN_S)
        self._scheduler.close()
        self._stop.set()
        self._ticker.join(timeout=1)

    def _tick(self) -> None:
        while not self._stop.wait(TICK_S):
            self._scheduler.sweep()
            self._metrics.show(self._scheduler.load())

    def _tokenize(self, word: str) -> list[int]:
        """Ask the engine over its loopback listener: tokenizing is not offered in-process."""
        body = json.dumps({"content": word, "add_special": False, "parse_special": False}).encode()
        request = urllib.request.Request(f"{self._address}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
            return tokens


class _TensorClient:
    """Answers one request with tensors; shapes carry the leading batch dimension of 1."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self.request: EnsembleRequest | None = None
        self._cum_log_prob = 0.0

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def send(self, text: str, new_tokens: int, log_probs: list[float]) -> None:
        self._sender.send(pb_utils.InferenceResponse(self._piece(text, new_tokens, log_probs)))

    def finish(self, text: str, new_tokens: int, log_probs: list[float], usage: Usage) -> None:
        tensors = self._piece(text, new_tokens, log_probs)
        asked = self.request
        if asked and asked.num_input_tokens:
            tensors.append(_scalar("num_input_tokens", usage.prompt_tokens, np.int32))
        if asked and asked.perf_metrics:
            tensors += [
                _scalar("kv_cache_reused_blocks", usage.reused_blocks, np.int32),
                _scalar("kv_cache_alloc_new_blocks", usage.total_blocks - usage.reused_blocks, np.int32),
                _scalar("kv_cache_alloc_total_blocks", usage.total_blocks, np.int32),
                _scalar("arrival_time_ns", usage.arrival_ns, np.int64),
                _scalar("first_scheduled_time_ns", usage.scheduled_ns, np.int64),
                _scalar("first_token_time_ns", usage.first_token_ns, np.int64),
                _scalar("last_token_time_ns", usage.last_token_ns, np.int64),
            ]
        self._end(pb_utils.InferenceResponse(tensors))

    def fail(self, message: str, *, invalid: bool = False) -> None:
        code = pb_utils.TritonError.INVALID_ARG if invalid else pb_utils.TritonError.UNAVAILABLE
        self._end(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)))

    def cancelled(self) -> None:
        error = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
        self._end(pb_utils.InferenceResponse(error=error))

    def _end(self, response: Any) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _piece(self, text: str, new_tokens: int, log_probs: list[float]) -> list[Any]:
        tensors = [
            pb_utils.Tensor("text_output", np.array([[text.encode()]], dtype=np.object_)),
            _scalar("batch_index", 0, np.int32),
            _scalar("sequence_index", 0, np.int32),
        ]
        asked = self.request
        if asked and asked.num_output_tokens:
            tensors.append(_scalar("num_output_tokens", new_tokens, np.int32))
        if asked and asked.log_probs:
            self._cum_log_prob += sum(log_probs)
            tensors.append(_scalar("cum_log_probs", self._cum_log_prob, np.float32))
            tensors.append(pb_utils.Tensor("output_log_probs", np.array([[log_probs]], dtype=np.float32)))
        return tensors


def _scalar(name: str, value: float, dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=dtype))


def _read_inputs(request: Any) -> dict[str, Any]:
    """The inputs that were sent: scalars where one value is declared, lists otherwise, text decoded."""
    values: dict[str, Any] = {}
    for tensor in INPUTS:
        sent = pb_utils.get_input_tensor_by_name(request, tensor.name)
        if sent is None:
            continue
        items = sent.as_numpy().reshape(-1).tolist()
        if tensor.datatype == "STRING":
            try:
                items = [item.decode() for item in items]
            except UnicodeDecodeError as error:
                raise UnsupportedInputError(f"{tensor.name} is not UTF-8: {error}") from error
        if tensor.dims == (1,):
            if len(items) != 1:
                raise UnsupportedInputError(f"{tensor.name} has {len(items)} values: send one")
            values[tensor.name] = items[0]
        else:
            values[tensor.name] = items
    return values


def _die_with_triton() -> None:
    triton = os.getsid(0)
    try:
        handle = os.pidfd_open(triton)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != triton:  # it ended earlier, and the handle is of nobody we know
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="triton-watch", daemon=True).start()
