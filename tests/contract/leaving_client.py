"""Clients of every API that ask a scripted model for something it takes its time over, and may leave meanwhile."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from tests.contract.grpc_front import channel, stub
from tests.harness import RunningGateway
from tests.tokenizer import SPECIALS

Phase = Literal["queued", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode")
"""The model serves another request first; ours has begun and has no token; tokens come."""

Api = Literal["openai stream", "openai unary", "generate_stream", "generate", "infer", "grpc stream", "grpc unary"]
OPENAI: tuple[Api, ...] = ("openai stream", "openai unary")
STREAMED = frozenset({"openai stream", "generate_stream", "grpc stream"})


@dataclass(frozen=True)
class Contract:
    """A model as a pool has it."""

    model: str
    kind: Literal["text", "llmapi", "ids", "steps"]
    """What its tensors are: of `scripted.py`, of `tokens.py`, or of the ensemble with `tokens.py` inside."""
    counts: str = ""
    """The model that does the work, if it is another."""
    decoupled: bool = True
    transport: Literal["grpc", "http"] = "grpc"

    @property
    def worker(self) -> str:
        return self.counts or self.model


@dataclass(frozen=True)
class Script:
    """What the model is to do: for a minute, or shortly if it is not going to be stopped."""

    phase: Phase
    short: bool

    def prompt(self, kind: str) -> str:
        """For a model whose prompt is text, or that the gateway tokenizes."""
        text = "x" * self._tokens
        if kind == "steps":
            return "".join(f"{special:X}" for special in self._specials()) + text
        if kind == "ids":
            return "".join(SPECIALS[special] for special in self._specials()) + text
        prefill = 0 if self.phase == "decode" else 1 if self.short else 60
        turn = self.phase == "queued"
        return json.dumps({"text": text, "cut": 1, "delay": 0.05, "first_delay": prefill, "in_turn": turn})

    def ids(self) -> list[int]:
        return [*self._specials(), *[100] * self._tokens]

    @property
    def _tokens(self) -> int:
        """Twenty a second."""
        if not self.short:
            return 1000
        return 30 if self.phase == "decode" else 10

    def _specials(self) -> list[int]:
        """See `tokens.py`."""
        turn = [12] if self.phase == "queued" else []
        prefill = [] if self.phase == "decode" else [6] if self.short else [7]
        return [*turn, *prefill, 3, 8]

    def tensors(self, kind: str, stream: bool) -> list[tuple[str, str, list[int], list[Any]]]:
        """Name, datatype, shape and values of each input."""
        if kind == "llmapi":
            return [
                ("text_input", "BYTES", [1], [self.prompt(kind)]),
                ("sampling_param_max_tokens", "INT32", [1], [5000]),
                ("streaming", "BOOL", [1], [stream]),
            ]
        if kind == "ids":
            ids = self.ids()
            return [
                ("input_ids", "INT32", [1, len(ids)], ids),
                ("input_lengths", "INT32", [1, 1], [len(ids)]),
                ("request_output_len", "INT32", [1, 1], [5000]),
                ("streaming", "BOOL", [1, 1], [stream]),
            ]
        return [
            ("text_input", "BYTES", [1, 1], [self.prompt(kind)]),
            ("max_tokens", "INT32", [1, 1], [5000]),
            ("stream", "BOOL", [1, 1], [stream]),
        ]

    def message(self, model: str, kind: str, stream: bool, id_: str) -> Any:
        """As a ModelInferRequest."""
        request = service_pb2.ModelInferRequest(model_name=model, id=id_)
        for name, datatype, shape, values in self.tensors(kind, stream):
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            if datatype == "BYTES":
                (text,) = values
                raw = len(text.encode()).to_bytes(4, "little") + text.encode()
            else:
                raw = np.array(values, dtype=np.int32 if datatype == "INT32" else np.bool_).tobytes()
            request.raw_input_contents.append(raw)
        return request


@dataclass
class Asking:
    """One client with one request. `answering` is set when a stream's first token is there; `refusal` is an error."""

    gateway: RunningGateway
    route: str
    contract: Contract
    api: Api
    script: Script
    id: str
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""

    async def run(self) -> None:
        """Ask. Cancelling this is the client's leaving."""
        kind, stream = self.contract.kind, self.api in STREAMED
        if self.api in ("grpc stream", "grpc unary"):
            await self._over_grpc(self.script.message(self.route, kind, stream, self.id))
        elif self.api in OPENAI:
            body = {"model": self.route, "prompt": self.script.prompt(kind), "max_tokens": 5000, "stream": stream}
            await self._over_http("/v1/completions", body)
        else:
            tensors = self.script.tensors(kind, stream)
            if self.api == "infer":
                names = ("name", "datatype", "shape", "data")
                fields: dict[str, Any] = {"inputs": [dict(zip(names, tensor, strict=True)) for tensor in tensors]}
            else:
                fields = {name: values[0] if len(values) == 1 else values for name, _, _, values in tensors}
            await self._over_http(f"/v2/models/{self.route}/{self.api}", {"id": self.id, **fields})

    async def _over_http(self, path: str, body: Any) -> None:
        async with aiohttp.ClientSession() as http, http.post(self.gateway.url + path, json=body) as answer:
            if answer.status != 200:
                self.refusal = await answer.text()
                return
            async for line in answer.content:
                if line.startswith(b"data: "):
                    self.answering.set()

    async def _over_grpc(self, message: Any) -> None:
        async with channel(self.gateway.grpc_address) as opened:
            try:
                if self.api == "grpc unary":
                    await stub(opened).ModelInfer(message)
                    return
                call = stub(opened).ModelStreamInfer()
                await call.write(message)
                async for answer in call:
                    self.refusal = answer.error_message
                    self.answering.set()
            except grpc.aio.AioRpcError as error:
                self.refusal = error.details() or ""
