"""The metrics of the embedded Triton model, named as TensorRT-LLM's so that dashboards and routers read them as such.

All are gauges read from the scheduler, except the count of requests by outcome, which is ours: Triton's own counters
take a cancelled request on a decoupled model for a success. Each write is a message to Triton's process, so only
values that changed are written.
"""

from collections.abc import Mapping
from typing import Any

from headrace.local.ensemble_scheduler import Load, blocks
from headrace.local.ensemble_signature import TOKENS_PER_BLOCK
from headrace.local.llm import SLOT_TOKENS, SLOTS

MAX_BLOCKS = blocks(SLOTS * SLOT_TOKENS)


class Metrics:
    """The exported series of one model."""

    def __init__(self, backend: Any, *, model: str, version: str) -> None:
        """`backend` is Triton's `triton_python_backend_utils` module."""
        self._backend = backend
        self._labels = {"model": model, "version": version}
        self._shown: dict[tuple[str, str], float] = {}
        gauge, counter = backend.MetricFamily.GAUGE, backend.MetricFamily.COUNTER
        self._requests = self._family("nv_trt_llm_request_metrics", "TRT LLM request metrics", gauge)
        self._kv_blocks = self._family("nv_trt_llm_kv_cache_block_metrics", "TRT LLM KV cache block metrics", gauge)
        self._outcomes = self._family("headrace_embedded_requests_total", "Requests by the way they ended", counter)
        self._series: dict[tuple[str, str], Any] = {}
        self.show(Load(0, 0, 0, 0, 0, {"finished": 0, "cancelled": 0, "failed": 0}))

    def show(self, load: Load) -> None:
        """Write what changed since the last call."""
        requests = {
            "active": load.waiting + load.scheduled,
            "max": SLOTS,
            "scheduled": load.scheduled,
            "context": load.context,
            "waiting": load.waiting,
        }
        kv_blocks: dict[str, float] = {
            "max": MAX_BLOCKS,
            "free": MAX_BLOCKS - load.used_blocks,
            "used": load.used_blocks,
            "tokens_per": TOKENS_PER_BLOCK,
            "reused": load.reused_blocks,
            "fraction": load.used_blocks / MAX_BLOCKS,
        }
        self._write(self._requests, "request_type", requests)
        self._write(self._kv_blocks, "kv_cache_block_type", kv_blocks)
        self._write(self._outcomes, "outcome", load.outcomes)

    def _family(self, name: str, description: str, kind: Any) -> Any:
        return self._backend.MetricFamily(name=name, description=description, kind=kind)

    def _write(self, family: Any, label: str, values: Mapping[str, float]) -> None:
        for value, amount in values.items():
            key = (label, value)
            if key not in self._series:
                self._series[key] = family.Metric(labels=self._labels | {label: value})
            if (shown := self._shown.get(key, 0)) == amount:
                continue
            if family is self._outcomes:
                self._series[key].increment(amount - shown)
            else:
                self._series[key].set(amount)
            self._shown[key] = amount
