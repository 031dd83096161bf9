"""`headrace up`: bring up a real fleet on loopback, and ask it something if wanted.

Standard output carries what was asked for (answers, or where to send requests), standard error everything else.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console

from headrace.local.errors import LocalFleetError
from headrace.local.run import PortOptions, Question, run_fleet

Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Default: a free port.", show_default=False)]
TritonPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=65533, help="First of three: HTTP, gRPC, metrics. Default: free ports.", show_default=False
    ),
]


def up(
    question: Annotated[
        str | None, typer.Option("--ask", metavar="TEXT", help="Ask this twice through the gateway, then end.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --ask: print one JSON object on standard output.")
    ] = False,
    model: Annotated[str, typer.Option("--model", metavar="ROUTE", help="With --ask: the route asked.")] = (
        "smollm2-triton"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="With --ask: longest answer, in tokens.")] = 128,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's OpenAI API.")] = 8000,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's admin API.")] = 9090,
    valkey_port: Port = None,
    triton_a_port: TritonPort = None,
    triton_b_port: TritonPort = None,
    llama_port: Port = None,
) -> None:
    """Bring up a real fleet on this machine: Valkey, two Triton servers, a llama.cpp server and the gateway."""
    err = Console(stderr=True)
    if as_json and question is None:
        raise _ended(err, "--json prints the answers to --ask: give both or none", 2)
    ports = PortOptions(http_port, admin_port, valkey_port, triton_a_port, triton_b_port, llama_port)
    asked = Question(question, model, max_tokens, as_json) if question is not None else None
    try:
        status = run_fleet(ports, asked, out=Console(file=sys.stdout), err=err)
    except LocalFleetError as error:
        raise _ended(err, str(error), error.exit_code) from None
    raise typer.Exit(status)


def _ended(err: Console, message: str, status: int) -> typer.Exit:
    err.print(f"headrace up: {message}", style="red", soft_wrap=True, markup=False, highlight=False)
    return typer.Exit(status)
