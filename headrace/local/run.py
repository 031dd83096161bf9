"""One run of the embedded fleet from start to end: checks, engines, gateway, a question or a wait, and the way out.

Engines and Valkey start side by side; the gateway starts when they are ready, so that it finds the fleet complete and
no start-up race shows as an unhealthy endpoint. A signal ends whatever is under way by cancelling this task; the
context managers then end the processes and remove what they left.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from rich.console import Console

from headrace.local.ask import Answer, ask, live_requests
from headrace.local.errors import LocalFleetError
from headrace.local.fleet_file import FleetPorts, write_fleet_file
from headrace.local.part import Part
from headrace.local.parts import GATEWAY_STOP_S, TritonPorts, gateway_part, llama_part, triton_part, valkey_part
from headrace.local.ports import LOOPBACK, free_ports, require_free
from headrace.local.preflight import available_memory_mib, require_linux, require_memory
from headrace.local.progress import make_progress
from headrace.local.run_dir import RunDir
from headrace.local.supervisor import Supervisor
from headrace.local.wheels import Wheels, find_wheels

TIMES_ASKED: Final = 2
"""The second answer shows what the prefix cache of the endpoint is worth."""
INTERRUPTED: Final = 130
GATEWAY_END_S: Final = 0.5
"""How long the end of the gateway may take to show after a request broke."""


@dataclass(frozen=True, slots=True)
class Question:
    """What `--ask` asks, and how the answers are printed."""

    text: str
    route: str
    max_tokens: int
    as_json: bool


@dataclass(frozen=True, slots=True)
class PortOptions:
    """Ports the user chose; None is any free one. A Triton takes three in a row: HTTP, gRPC, metrics."""

    http: int
    admin: int
    valkey: int | None = None
    grpc: int | None = None
    triton_a: int | None = None
    triton_b: int | None = None
    llama: int | None = None

    def chosen(self) -> list[tuple[int, str, str]]:
        """Every chosen port with the part it is for and the option that chose it."""
        singles = [
            (self.http, "gateway's HTTP API", "--http-port"),
            (self.admin, "gateway's admin API", "--admin-port"),
            (self.grpc, "gateway's gRPC API", "--grpc-port"),
            (self.valkey, "Valkey server", "--valkey-port"),
            (self.llama, "llama.cpp server", "--llama-port"),
        ]
        chosen = [(port, what, option) for port, what, option in singles if port is not None]
        for first, name in ((self.triton_a, "triton-a"), (self.triton_b, "triton-b")):
            if first is not None:
                chosen += [(first + i, f"Triton server {name}", f"--{name}-port") for i in range(3)]
        return chosen


def settle_ports(options: PortOptions) -> FleetPorts:
    """Check the chosen ports and find free ones for the others.

    Raises:
        LocalFleetError: a chosen port is in use or chosen twice.
    """
    users: dict[int, str] = {}
    for port, what, option in options.chosen():
        if port in users:
            raise LocalFleetError(
                f"port {port} is given to both {users[port]} and {option}: choose another for one of them", exit_code=2
            )
        users[port] = option
        require_free(port, what=what, option=option)
    free = iter(free_ports(9, users))

    def triton(first: int | None) -> TritonPorts:
        if first is None:
            return TritonPorts(next(free), next(free), next(free))
        return TritonPorts(first, first + 1, first + 2)

    return FleetPorts(
        http=options.http,
        admin=options.admin,
        grpc=options.grpc or next(free),
        valkey=options.valkey or next(free),
        triton_a=triton(options.triton_a),
        triton_b=triton(options.triton_b),
        llama=options.llama or next(free),
    )


def run_fleet(options: PortOptions, question: Question | None, *, out: Console, err: Console) -> int:
    """Run the fleet until it is ended, or until the question is answered; return the exit status.

    Raises:
        LocalFleetError: it could not start, or something vital failed.
    """
    started = time.monotonic()
    require_linux()
    wheels = find_wheels()
    require_memory(available_memory_mib())
    ports = settle_ports(options)
    with RunDir() as run:
        err.print(f"logs and fleet.yaml are in {run.path}", soft_wrap=True, highlight=False)
        return asyncio.run(_run(_Run(wheels, run, ports, question, started, out, err)))


@dataclass(frozen=True, slots=True)
class _Run:
    wheels: Wheels
    run_dir: RunDir
    ports: FleetPorts
    question: Question | None
    started: float
    out: Console
    err: Console

    def engine_parts(self) -> list[Part]:
        return [
            valkey_part(self.wheels.valkey, self.run_dir, self.ports.valkey),
            triton_part(self.wheels, self.run_dir, "triton-a", self.ports.triton_a),
            triton_part(self.wheels, self.run_dir, "triton-b", self.ports.triton_b),
            llama_part(self.wheels, self.run_dir, self.ports.llama),
        ]

    def gateway(self) -> Part:
        fleet_file = self.run_dir.path / "fleet.yaml"
        write_fleet_file(fleet_file, self.ports)
        return gateway_part(self.run_dir, fleet_file, http_port=self.ports.http, admin_port=self.ports.admin)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.http}"


async def _run(run: _Run) -> int:
    progress = make_progress(run.err)
    signals: list[signal.Signals] = []
    try:
        async with Supervisor(progress) as supervisor:
            _cancel_on_signal(signals, supervisor.kill)
            await supervisor.start(run.engine_parts())
            await supervisor.start([run.gateway()])
            ready_s = time.monotonic() - run.started
            progress.close()
            if run.question is None:
                _welcome(run, ready_s)
                try:
                    await supervisor.wait()
                except asyncio.CancelledError:  # a signal is the usual end of serving
                    await _say_what_stopping_waits_for(run)
                return 0
            return await _answer_or_fail(supervisor, run, run.question, ready_s)
    except asyncio.CancelledError:
        if not signals:
            raise
        run.err.print(f"headrace up: ended by {signals[0].name} before it was done", highlight=False)
        return INTERRUPTED
    finally:
        progress.close()


async def _answer_or_fail(supervisor: Supervisor, run: _Run, question: Question, ready_s: float) -> int:
    """Answer the question, unless the gateway ends meanwhile: then its log says more than the broken request."""
    answering = asyncio.create_task(_answer(run, question, ready_s))
    ending = asyncio.create_task(supervisor.wait())
    try:
        done, _ = await asyncio.wait([answering, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending not in done and answering.exception():
            await asyncio.wait([ending], timeout=GATEWAY_END_S)
        if ending.done():
            ending.result()
        return answering.result()
    finally:
        answering.cancel()
        ending.cancel()


async def _answer(run: _Run, question: Question, ready_s: float) -> int:
    answers: list[Answer] = []
    for number in range(1, TIMES_ASKED + 1):
        answer = await ask(run.url, question.route, question.text, question.max_tokens)
        answers.append(answer)
        if not question.as_json:
            run.out.print(answer.text, soft_wrap=True, markup=False, highlight=False)
        run.err.print(f"[{number}] {answer.summary()}", soft_wrap=True, markup=False, highlight=False)
    if question.as_json:
        report = {"ready_s": round(ready_s, 2), "requests": [answer.as_json() for answer in answers]}
        run.out.file.write(msgspec.json.encode(report).decode() + "\n")
    return 0


WELCOME = """\
ready in {ready_s:.1f} s
  OpenAI API  {url}/v1
  KServe API  {url}/v2, grpc://{grpc}  (as Triton's clients speak it)
  admin API   http://{admin}  (/readyz, /metrics)
  models      smollm2, smollm2-triton, smollm2-llama

try it:
  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'

Ctrl-C ends everything; requests still running get up to {stop_s:g} s."""


def _welcome(run: _Run, ready_s: float) -> None:
    body = json.dumps(
        {
            "model": "smollm2",
            "stream": True,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
    )
    text = WELCOME.format(
        ready_s=ready_s,
        url=run.url,
        admin=f"{LOOPBACK}:{run.ports.admin}",
        grpc=f"{LOOPBACK}:{run.ports.grpc}",
        body=body,
        stop_s=GATEWAY_STOP_S,
    )
    run.out.print(text, soft_wrap=True, markup=False, highlight=False)


async def _say_what_stopping_waits_for(run: _Run) -> None:
    count = await live_requests(f"http://{LOOPBACK}:{run.ports.admin}")
    line = "stopping"
    if count:
        running = f"{count} request{'' if count == 1 else 's'} still running"
        line = f"stopping: {running}, up to {GATEWAY_STOP_S:g} s; Ctrl-C again to cut them"
    run.err.print(line, soft_wrap=True, highlight=False)


def _cancel_on_signal(received: list[signal.Signals], at_once: Callable[[], None]) -> None:
    """For the life of the loop: the first signal cancels this task, a second one means that the end takes too long."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        else:
            at_once()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
