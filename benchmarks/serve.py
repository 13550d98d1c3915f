"""What the service costs: gated answers per second, their latency at a given load, and the server's CPU time of each.

    python benchmarks/serve.py [--requests 20000] [--connections 32] [--rate 750] [--seconds 10] [--no-ledger] [--no-log] [--json]

A small net (4 → 64 → 64 → 2) is trained for a few steps, released and served by `lamina serve` in a process of its own, with
ledger, decision log and an API key; the client is another process, without any library. `throughput`: every connection asks
again as soon as it has its answer. `latency`: requests begin at a fixed rate, and the time counts from the moment at which
each was due, so a queue shows. `cpu_microseconds` is what the server spent on one request, all its threads together, which
does not depend on who else is at work; `load` is the load average of the machine beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUERY = {
    "rights": {"classes": ["clinical", "sensitive"], "max_epsilon": 9.0, "min_noise_multiplier": 0.0, "purpose": "care"}
}
NETS = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
"""
POLICY = """
[corpus]
origin = "example.org/benchmark"
delta = 1e-5
[class.clinical]
population = 120
purposes = ["care"]
[class.sensitive]
population = 80
profile = {top = 0.34}
purposes = ["care"]
"""


def make_folder(folder: Path) -> Path:
    """A release with all that a service needs beside it; returns the ledger."""
    import torch
    from torch import nn

    import lamina
    from lamina.ledger.corpus_terms import ledger_key_path
    from lamina.ledger.writer import Ledger
    from lamina.release.maker import make_release
    from lamina.sign.keys import PrivateKey, write_new

    (folder / "nets.py").write_text(NETS)
    space: dict[str, Any] = {}
    exec(NETS, space)
    model, policy = space["net"](), lamina.Policy.parse(POLICY)
    x = torch.randn(200, 4)
    corpus = lamina.Corpus(x, (x.sum(1) > 0).long(), policy=policy, cls=["clinical"] * 120 + ["sensitive"] * 80)
    epsilon = {"clinical": 2.0, "sensitive": 1.0}
    plan = lamina.make_plan(lamina.LayerStack.from_model(model), policy, batch=40, steps=20, epsilon=epsilon)
    loss = nn.CrossEntropyLoss(reduction="none")
    run = folder / "runs" / "first"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lamina.Trainer(model, optimizer, loss, corpus, plan, folder=run, progress=False).fit()
    key = PrivateKey.generate()
    place = Path(os.path.realpath(run / "ledger.db"))
    with Ledger.open(place, PrivateKey.load(ledger_key_path(place), None)) as ledger:
        make_release(folder / "release", [run], ledger, key)
    write_new(folder / "release.pub", key.public.pem(), "the key", mode=0o644)
    PrivateKey.generate().save(folder / "log.key", None)
    (folder / "keys.txt").write_text(f"bench {hashlib.sha256(b'bench').hexdigest()}\n")
    return place


def request_bytes() -> bytes:
    body = json.dumps({"query": QUERY, "inputs": [[0.1, 0.2, 0.3, 0.4]]}).encode()
    head = "POST /v1/infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bench\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Connection:
    """One connection that is kept: a request, its whole answer, the next."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes) -> int:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        await self._reader.readexactly(length)
        return int(head[9:12])


async def throughput(port: int, requests: int, connections: int) -> dict[str, float]:
    opened = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(connections)]
    request, left, wrong = request_bytes(), requests, 0

    async def go(connection: Connection) -> None:
        nonlocal left, wrong
        while left > 0:
            left -= 1
            wrong += await connection.ask(request) != 200

    began = time.perf_counter()
    await asyncio.gather(*(go(each) for each in opened))
    return {"requests_per_second": requests / (time.perf_counter() - began), "not_200": wrong}


async def latency(port: int, rate: float, seconds: float, connections: int) -> dict[str, float]:
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(Connection(*await asyncio.open_connection("127.0.0.1", port)))
    request, times, wrong = request_bytes(), [], 0

    async def one(due: float) -> None:
        nonlocal wrong
        connection = await free.get()
        wrong += await connection.ask(request) != 200
        times.append(time.perf_counter() - due)
        free.put_nowait(connection)

    began, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    times.sort()
    at = {f"p{q}_ms": 1e3 * times[min(len(times) - 1, int(len(times) * q / 100))] for q in (50, 95, 99)}
    return {"rate": rate, **at, "max_ms": 1e3 * times[-1], "not_200": wrong}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=float, default=750.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--no-log", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="lamina-serve-") as name:
        folder = Path(name)
        ledger = make_folder(folder)
        words = [
            "release",
            "--trust",
            "release.pub",
            "--model",
            "nets:net",
            "--inputs",
            "float32:4",
            "--keys",
            "keys.txt",
        ]
        words += ["--rate", "1e9", "--concurrent", "256", "--concurrent-per-key", "256", "--port", "0", "--json"]
        words += [] if asked.no_ledger else ["--ledger", str(ledger)]
        words += [] if asked.no_log else ["--log", "decisions.jsonl", "--log-key", "log.key"]
        command = [sys.executable, "-m", "lamina", "serve", *words]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            told = ""
            while not told.endswith("}\n"):
                told += (line := server.stdout.readline())
                if not line:
                    sys.exit("the service did not start")
            port = int(json.loads(told)["url"].rpartition(":")[2])
            asyncio.run(throughput(port, 500, 4))  # warm
            before = cpu_seconds(server.pid)
            most = asyncio.run(throughput(port, asked.requests, asked.connections))
            most["cpu_microseconds"] = 1e6 * (cpu_seconds(server.pid) - before) / asked.requests
            half = asyncio.run(latency(port, asked.rate, asked.seconds, asked.connections))
            server.terminate()
    found = {"load": load, "cores": os.cpu_count(), "throughput": most, "latency": half}
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        for part, figures in (("throughput", most), ("latency", half)):
            print(f"{part:11}", "  ".join(f"{name} {value:,.1f}" for name, value in figures.items()))
        print(f"load        {load:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
