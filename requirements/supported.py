"""Say whether this Python can hold the locked packages: nothing and exit 0 if so, else one sentence and exit 1.

`make setup` runs it with the interpreter it found, before anything is installed. The limits are those of the wheels in
the lock files: numpy 1.26 ends at CPython 3.12, and the Triton server of nvidia-pytriton is built for Linux on x86-64
with glibc 2.35 or newer. It uses only what Python 3.6 already had, so that an old interpreter can run it and say so.
"""

import importlib.util
import platform
import sys


def shortcoming():
    """One sentence that says what is missing, or None."""
    here = f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return f"{here}; headrace needs 3.11 or 3.12: install one, or name it with make PYTHON=/path/to/python3.11."
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"The embedded engines need Linux on x86-64; this is {sys.platform} on {platform.machine()}."
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        system = f"{libc} {version}".strip() or "another C library"
        return f"The embedded Triton needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04); this system has {system}."
    if importlib.util.find_spec("ensurepip") is None:
        return f"{here} without venv: install it (Debian, Ubuntu: apt install python3-venv) and run make again."
    return None


if __name__ == "__main__":
    sentence = shortcoming()
    if sentence:
        sys.exit("make setup: " + sentence)
