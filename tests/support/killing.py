"""A process that forks training runs and kills them: `python killing.py`, one JSON command a line.

Importing torch takes seconds and a fork milliseconds, so that fifty kills fit into a test. The parent never
computes anything: a forked child must not inherit threads.

    {"folder": F, "after": seconds}     SIGKILL that long after the run began
    {"folder": F, "call": n}            SIGKILL before the n-th call that changes something (see `moments`)
    {"folder": F}                       let it finish; answers with what it cost and a digest of its weights
    {…, "compiled": "traced"}           with compiled steps, by the graph as it was traced; "inductor": by the compiler;
                                        "off": the same data, not compiled
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lamina.plan.charges import SignedAccount

sys.path.insert(0, str(Path(__file__).parent))
import problem
import pytest
import torch
from run_state import moments, number_seeds

from lamina.engine.execute import compiled
from lamina.ledger.verify.verifier import verify
from lamina.plan.step_plan import StepPlan

OPTIONS: dict[str, Any] = {"ema": 0.9, "max_occurrences": {"clinical": 4}}
STRICT = "clinical@c=1,z=0.05"
SCALE = 0.5


def accounts(plan: StepPlan) -> list[SignedAccount]:
    """A signed bound that the whole run meets exactly: a step charged twice would not fit."""
    epsilon = plan.epsilon("clinical", scale=SCALE)
    return [SignedAccount(name=STRICT, cls="clinical", scale=SCALE, epsilon=epsilon)]


def ledger(folder: Path) -> dict[str, Any]:
    """What an auditor finds: the same, however often the run was killed."""
    found = verify(folder / "ledger.db")
    return {"problem": str(found.problem), "size": found.size, "signed": found.signed, "held": len(found.held)}


def child(command: dict[str, Any], answer: int) -> None:
    number_seeds(pytest.MonkeyPatch())
    count, target = 0, command.get("call")

    def act() -> None:
        nonlocal count
        count += 1
        if count == target:
            os.kill(os.getpid(), signal.SIGKILL)

    with moments(act) if "call" in command else nullcontext():
        plan = problem.plan(problem.net(), command["steps"])
        options = dict(OPTIONS)
        if backend := command.get("compiled"):
            compiled.BACKEND = "inductor" if backend == "inductor" else "eager"
            options |= {"compiled": backend != "off", "corpus": problem.singles()}
            options |= {"hardened": False}  # a grid would hide the last bits of the sums
        trainer = problem.trainer(
            Path(command["folder"]), plan=plan, segment=command["segment"], accounts=accounts(plan), **options
        )
        os.write(answer, b"begun\n") if "call" not in command else None
        began = time.perf_counter()
        outcome = trainer.fit()
        seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert trainer.state.ema is not None and trainer.state.counts is not None
    for tensor in trainer.state.ema.average.values():
        digest.update(tensor.numpy().tobytes())
    digest.update(trainer.state.counts.tobytes())
    told = {
        "epsilon": outcome.epsilon,
        "total": outcome.total,
        "steps": outcome.steps,
        "notes": outcome.notes,
        "bounds": json.loads((outcome.folder / "metrics.json").read_text())["bounds"],
        "weights": digest.hexdigest(),
        "ledger": ledger(outcome.folder),
        "calls": count,
        "seconds": seconds,
        "compiled": getattr(trainer._engine.compiled, "steps", 0),
    }
    sys.stdout.flush()
    with os.fdopen(os.dup(answer), "w") as stream:
        stream.write(json.dumps(told) + "\n")


def serve(command: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            child(command, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as stream:
        if "after" in command:
            stream.readline()  # "begun": building the run is not part of it
            time.sleep(command["after"])
            os.kill(pid, signal.SIGKILL)
        lines = [line for line in stream if line != "begun\n"]
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return {"killed": True}
    if status != 0:
        return {"killed": False, "failed": True}
    return {"killed": False, **json.loads(lines[-1])}


if __name__ == "__main__":
    model = problem.net()
    accounts(problem.plan(model, int(sys.argv[1])))  # calibrated and priced once, before any fork
    torch.optim.SGD(model.parameters(), lr=0.1)  # the first optimiser of a process imports half of torch
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
