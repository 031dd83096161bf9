"""Starts Triton with a TensorRT-LLM engine over the GPUs of one pod, or of a group of pods. Runs in Triton's image, so
it uses Python's own library only.

The engine is one process for each GPU (a rank), started by mpirun: rank 0 answers, the others only load `tensorrt_llm`
and work for it. In a group the leader starts the ranks of the other pods over ssh, where a worker does nothing but wait
for that; host names follow from the leader's, as LeaderWorkerSet gives them. mpirun gives nobody time to finish: told
to stop, this script tells rank 0, and mpirun when that has ended.

The model repository is not changed: what is served is a copy made of links, with parameters in its `config.pbtxt`.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PARAMETERS = Path("/etc/headrace/engine/parameters.json")
KEYS = Path("/etc/headrace/ssh")
OWN = Path("/tmp/headrace")
COPY = OWN / "repository"
KNOWN_HOSTS = OWN / "known_hosts"
FIRST_RANK = OWN / "rank0.pid"
SSH_PORT = 2222
MODEL = "tensorrt_llm"
KEY_OF = {"batching_strategy": "gpt_model_type"}
"""Parameters whose key in config.pbtxt is not the name of their placeholder."""


def configured(text, parameters, *, engine):
    """A `config.pbtxt` with `parameters`: in the place of `${name}`, and, in the `engine`'s own, of what was there."""
    for name, value in parameters.items():
        said = json.dumps(value) if not isinstance(value, str) else value
        text = text.replace("${" + name + "}", said)
        if engine:
            key = re.escape(KEY_OF.get(name, name))
            pattern = r'(key:\s*"' + key + r'"\s*,?\s*value:?\s*\{\s*string_value:\s*)"[^"]*"'
            text = re.sub(pattern, lambda match, said=said: f'{match[1]}"{said}"', text)
    if engine and "decoupled_mode" in parameters:
        text = re.sub(r"decoupled:\s*\w+", "decoupled: " + json.dumps(parameters["decoupled_mode"]), text)
    if "triton_max_batch_size" in parameters:  # of all models alike, for an ensemble; 0 means no batches
        text = re.sub(
            r"(?m)^max_batch_size:\s*[1-9]\d*", f"max_batch_size: {parameters['triton_max_batch_size']}", text
        )
    return text


def copy_repository(source, copy, parameters):
    """Make `copy` of links to what is in `source`, with `parameters`."""
    shutil.rmtree(copy, ignore_errors=True)
    for model in sorted(path for path in source.iterdir() if path.is_dir()):
        made = copy / model.name
        made.mkdir(parents=True)
        for path in model.iterdir():
            if path.name == "config.pbtxt":
                text = configured(path.read_text(), parameters, engine=model.name == MODEL)
                (made / path.name).write_text(text)
            else:
                (made / path.name).symlink_to(path)


def server_command(rank, options):
    """Triton as the process of this rank."""
    command = [
        "tritonserver",
        f"--model-repository={COPY}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=rank{rank}_",
        f"--exit-timeout-secs={options.exit_timeout}",
    ]
    if rank == 0:
        return [*command, f"--http-port={options.http_port}", "--grpc-port=8001", "--metrics-port=8002"]
    silent = [f"--allow-{what}=false" for what in ("http", "grpc", "metrics")]
    return [*command, *silent, "--model-control-mode=explicit", f"--load-model={MODEL}"]


def group(leader, nodes):
    """Addresses of a group's pods but the leader: `x-0.x.ns` leads `x-0-1.x.ns`, `x-0-2.x.ns`, ..."""
    name, _, rest = leader.partition(".")
    return [f"{name}-{number}.{rest}" for number in range(1, nodes)]


def mpi_command(mpirun, script, arguments, options, workers):
    """All ranks, each of which finds out by itself which one it is."""
    command = [mpirun, "-np", str(options.ranks), "--mca", "odls_base_sigkill_timeout", "2"]
    if workers:
        slots = options.ranks // options.nodes
        hosts = ",".join(f"{host}:{slots}" for host in (socket.gethostname(), *workers))
        options_of_ssh = f"-o StrictHostKeyChecking=yes -o UserKnownHostsFile={KNOWN_HOSTS} -o LogLevel=ERROR"
        ssh = f"ssh -p {SSH_PORT} -i {KEYS}/ssh-privatekey {options_of_ssh}"
        command += ["--host", hosts, "--mca", "plm_rsh_agent", ssh, "-x", "PATH", "-x", "LD_LIBRARY_PATH"]
    return [*command, sys.executable, script, "rank", *arguments]


def alive(pid):
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def run(command, exit_timeout):
    """Run mpirun's `command` to its end. On SIGTERM the first rank has `exit_timeout` seconds to finish."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    FIRST_RANK.unlink(missing_ok=True)
    process = subprocess.Popen(command)
    first = None
    while process.poll() is None:
        time.sleep(0.2)
        if not told:
            continue
        if first is None and FIRST_RANK.exists():
            first = int(FIRST_RANK.read_text())
            if alive(first):
                os.kill(first, signal.SIGTERM)
        if first is None or not alive(first) or time.monotonic() > told[0] + exit_timeout:
            process.terminate()
            process.wait()
    return 0 if told else process.returncode


def wait_for(hosts):
    """Wait until ssh answers on all of them; the pod's startup probe ends the wait."""
    for host in hosts:
        while True:
            try:
                socket.create_connection((host, SSH_PORT), timeout=5).close()
                break
            except OSError as error:
                print(f"waiting for {host}: {error}", flush=True)
                time.sleep(2)


def ssh_server():
    """sshd without root: on a port of its own, for the holder of the group's key, which is its own key, too."""
    host_key, authorized = OWN / "host_key", OWN / "authorized_keys"
    for file, secret in ((host_key, "ssh-privatekey"), (authorized, "ssh-publickey")):
        file.write_bytes((KEYS / secret).read_bytes())
        file.chmod(0o600)
    settings = {
        "Port": SSH_PORT, "HostKey": host_key, "AuthorizedKeysFile": authorized, "PidFile": "none", "UsePAM": "no",
        "PasswordAuthentication": "no", "StrictModes": "no",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    sshd = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if sshd is None:
        sys.exit("the image has no sshd, which a group of pods needs: take one with openssh-server")
    os.execv(sshd, [sshd, "-D", "-e", "-f", "/dev/null", *options])


def main(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the first process of a container has no default for it
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["serve", "worker", "rank"])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--exit-timeout", type=int, default=300)
    options, more = parser.parse_known_args(arguments)  # what else there is, is Triton's
    if options.role == "rank":
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 0:
            FIRST_RANK.write_text(str(os.getpid()))
        command = server_command(rank, options) + more
        os.execvp(command[0], command)
    copy_repository(options.repository, COPY, json.loads(PARAMETERS.read_text()))
    if options.role == "worker":
        ssh_server()
    if options.ranks == 1:
        command = server_command(0, options) + more
        os.execvp(command[0], command)
    workers = group(os.environ["LWS_LEADER_ADDRESS"], options.nodes) if options.nodes > 1 else []
    if workers:  # nobody but a pod of the group has its key
        KNOWN_HOSTS.write_text("* " + (KEYS / "ssh-publickey").read_text())
    wait_for(workers)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        sys.exit("the image has no mpirun: take Triton's image for TensorRT-LLM (...-trtllm-python-py3)")
    command = mpi_command(mpirun, __file__, arguments[1:], options, workers)
    sys.exit(run(command, options.exit_timeout))


if __name__ == "__main__":
    main(sys.argv[1:])
