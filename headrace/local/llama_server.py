"""The process of the embedded OpenAI-protocol engine: `python -m headrace.local.llama_server`.

llama.cpp's own HTTP server does all the work on its own threads; this main thread only waits for the signal to end.
"""

import argparse
import os
import signal
from pathlib import Path

from headrace.local.llm import engine_params


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="headrace.local.llama_server", description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before llama.cpp starts its threads, which inherit the mask

    import xllamacpp

    server = xllamacpp.Server(engine_params(options.weights, host=options.host, port=options.port))
    print(f"llama.cpp listens on {server.listening_address}", flush=True)
    signal.sigwait(ends)
    os._exit(0)  # a generation under way would hold up llama.cpp's orderly end


if __name__ == "__main__":
    main()
