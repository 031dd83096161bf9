"""A worker's process: `python -m headrace.workers DESCRIPTOR`, the descriptor being its end of the channel.

SIGTERM, SIGINT and SIGHUP are the supervisor's to answer. Service managers send them to all processes of a service: a
worker that took its own for the first wish to stop would take the supervisor's message for the second, and cut its
streams. They are ignored before anything else is imported, which takes a second, in which they would end the worker.
"""

import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    from headrace.workers.worker import main

    main(int(sys.argv[1]))
