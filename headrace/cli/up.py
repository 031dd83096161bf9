"""`headrace up`: bring up a real fleet on loopback, and ask it something if wanted.

Standard output carries what was asked for (answers, or where to send requests), standard error everything else.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console

from headrace.local.errors import LocalFleetError
from headrace.local.fleet_file import DEFAULT_ROUTE, ROUTES
from headrace.local.run import PortOptions, Question, run_fleet

Port = Annotated[
    int | None, typer.Option(min=1, max=65535, metavar="PORT", help="Default: a free port.", show_default=False)
]
TritonPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65533,
        metavar="PORT",
        help="First of three: HTTP, gRPC, metrics. Default: free ports.",
        show_default=False,
    ),
]


def up(
    question: Annotated[
        str | None, typer.Option("--ask", metavar="TEXT", help="Ask this twice through the gateway, then end.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --ask: print one JSON object on standard output.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="ROUTE",
            help=f"With --ask: the route asked. [default: {DEFAULT_ROUTE}]",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="With --ask: longest answer, in tokens.")
    ] = 128,
    http_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The gateway's OpenAI API.")] = 8000,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The gateway's admin API.")] = 9090,
    grpc_port: Port = None,
    valkey_port: Port = None,
    triton_a_port: TritonPort = None,
    triton_b_port: TritonPort = None,
    llama_port: Port = None,
) -> None:
    """Bring up a real fleet on this machine, to try things.

    It is Valkey, two Triton servers, a llama.cpp server and the gateway, all on 127.0.0.1. The engines serve the model
    SmolLM2-135M under the routes smollm2, smollm2-triton and smollm2-llama. Logs and the gateway's fleet.yaml are in a
    folder of the run, named when it starts; after a failure the logs stay there for a day.

    Ctrl-C ends everything; requests still running get up to 10 seconds, a second Ctrl-C cuts them.

    \b
    Examples:
      headrace up
      headrace up --http-port 18001 --admin-port 18002
      headrace up --ask "What is the capital of France?" --json
    """
    err = Console(stderr=True)
    if question is None:
        for option, given, what in (
            ("--json", as_json, "prints the answers to --ask"),
            ("--model", model is not None, "says which route --ask asks"),
        ):
            if given:
                raise _ended(err, f"{option} {what}: give both or none", 2)
    elif not question.strip():
        raise _ended(err, "--ask is empty: give the question", 2)
    route = DEFAULT_ROUTE if model is None else model
    if route not in ROUTES:
        raise _ended(err, f"--model {route} is no route of this fleet: choose from {', '.join(ROUTES)}", 2)
    ports = PortOptions(http_port, admin_port, valkey_port, grpc_port, triton_a_port, triton_b_port, llama_port)
    asked = Question(question, route, max_tokens, as_json) if question is not None else None
    try:
        status = run_fleet(ports, asked, out=Console(file=sys.stdout), err=err)
    except LocalFleetError as error:
        raise _ended(err, str(error), error.exit_code) from None
    raise typer.Exit(status)


def _ended(err: Console, message: str, status: int) -> typer.Exit:
    err.print(f"headrace up: {message}", style="red", soft_wrap=True, markup=False, highlight=False)
    return typer.Exit(status)
