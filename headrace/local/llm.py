"""The settings of llama.cpp that all embedded engines share, and the reasons for their values.

A batch of 128 tokens instead of llama.cpp's 2048 is what makes a cancel effective during prefill: llama.cpp looks at a
request between two batches only, and on two slow cores a batch of 2048 tokens takes longer than ten seconds. Prefill
loses a few percent of its speed.

The context is split evenly over the slots, so a slot's share is the longest prompt plus answer that can be served.
Prompts pushed out of their slot are kept in a bounded piece of memory, as a GPU engine keeps blocks nobody uses now.
"""

from pathlib import Path
from typing import Any

SLOTS = 4
"""Requests decoded at the same time."""
SLOT_TOKENS = 4096
"""Prompt plus answer tokens of one request."""
BATCH_TOKENS = 128
THREADS = 1
"""Threads of one engine. The threads of one engine wait for each other busily at every layer, so that three engines
with two threads each on two cores spend their time waiting: decoding falls from 14-25 tokens per second to 1-2."""
SPILLED_PROMPTS_MIB = 256
CHAT_TEMPLATE = Path(__file__).parent / "templates" / "chatml.jinja"
"""Rendered by the gateway for Triton and by llama.cpp for itself: a conversation is the same prompt everywhere."""
MODEL_NAME = "smollm2"
"""The name the OpenAI-protocol engine answers to."""


def engine_params(weights: Path, *, host: str = "127.0.0.1", port: int = 0) -> Any:
    """Build the `xllamacpp.CommonParams` of one engine; port 0 lets llama.cpp choose one itself."""
    import xllamacpp  # the optional wheel: imported only in the process that runs an engine

    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.model_alias = {MODEL_NAME}
    params.hostnames = [host]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * SLOT_TOKENS
    params.n_batch = BATCH_TOKENS
    params.cpuparams.n_threads = THREADS
    params.cpuparams_batch.n_threads = THREADS
    params.cache_ram_mib = SPILLED_PROMPTS_MIB
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.warmup = False
    params.ui = False
    params.chat_template = CHAT_TEMPLATE.read_text()
    return params
