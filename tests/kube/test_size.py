"""What following a thousand pods costs a replica of discovery, as the process that it is.

`KUBE_IDLE_S=60` also has it watched for so long while nothing happens but its own renewals of the lease.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil

from headrace.local.ports import LOOPBACK, free_ports
from tests.contract.state_gateways import until
from tests.discoveries import FILE, gateway
from tests.kube.cluster import Cluster, engine
from tests.valkey import ValkeyProcess

PODS = 1000
IDLE_S = float(os.environ.get("KUBE_IDLE_S", "0"))
MOST_MEMORY = 150e6
MOST_IDLE_CPU = 0.03


async def test_a_thousand_pods_are_followed_in_150_mb(
    cluster: Cluster, kubeconfig: Path, redis: ValkeyProcess, tmp_path: Path
) -> None:
    nodes = [await cluster.add_node(f"n{number}") for number in range(10)]
    at_once = asyncio.Semaphore(20)

    async def run(number: int) -> None:
        async with at_once:
            await cluster.run(engine(f"e-{number}", nodes[number % 10], number, annotations={"words": "x" * 2000}))

    await asyncio.gather(*(run(number) for number in range(PODS)))
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(json.dumps({**FILE, "redis": {"url": redis.url}}))
    (port,) = free_ports(1)
    async with gateway(redis) as one:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace", "discovery", "--config", str(fleet), "--kubeconfig", str(kubeconfig),
            "--listen", f"{LOOPBACK}:{port}", stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await until(lambda: len(one.endpoints) == PODS, within_s=30)
            measured = psutil.Process(process.pid)
            await cluster.remove("e-0")
            await until(lambda: len(one.endpoints) == PODS - 1, within_s=1)
            if IDLE_S:
                await asyncio.sleep(2)
                before = sum(measured.cpu_times()[:2])
                await asyncio.sleep(IDLE_S)
                busy = (sum(measured.cpu_times()[:2]) - before) / IDLE_S
                print(f"{PODS} pods: {measured.memory_info().rss / 1e6:.0f} MB, {busy:.2%} of a core idle")
                assert busy < MOST_IDLE_CPU
            assert measured.memory_info().rss < MOST_MEMORY
        finally:
            process.terminate()
            async with asyncio.timeout(20):
                assert await process.wait() == 0
