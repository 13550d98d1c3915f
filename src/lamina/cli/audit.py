"""Try to refute what a run claims about one step, with public, simulated or Gaussian contributions.

Spends and writes nothing, and reads no private data. Every private class is attacked with canaries under the same noise seed, and the
noise of empty steps is measured (docs/audit.md).

Examples:

  lamina audit step RUN.toml            on Gaussian inputs
  lamina audit step RUN.toml --proxy simulated:nets:data --quick
"""

from __future__ import annotations

from pathlib import Path

from lamina.cli.command import Answer, argument, command, group, option, table
from lamina.cli.terminal import print_note, results_only


@command()
def step(
    run: Path = argument("RUN.toml", "the run: its model, loss, policy and plan", default=...),
    proxy: str = option(
        "gaussian, public:nets:data or simulated:nets:data", "--proxy", metavar="PROXY", default="gaussian"
    ),
    shape: str | None = option("shape of one example, for gaussian: 12,256", "--input", metavar="SHAPE"),
    contributions: int = option("how many contributions a step has", min=2, max=64, default=6),
    quick: bool = option("eight canaries for each class instead of all of them"),
    seed: int = option("seed of inputs, canaries and noise", min=0, default=0),
) -> Answer:
    """Take one step with a contribution and without it, under the same noise, and compare with the plan's claim.

    The exit code is 1 if a claim is refuted.
    """
    import torch

    from lamina.audit.step_audit import audit_step
    from lamina.audit.target import AuditTarget
    from lamina.cli.planned_run import PlannedRun
    from lamina.cli.proxy_measure import MeasureOptions
    from lamina.cli.run_file import RunFile
    from lamina.engine.batch import Batch

    beside = run.resolve().parent
    with results_only():
        torch.manual_seed(seed)
        planned = PlannedRun.of(RunFile.load(run), beside)
        wanted = MeasureOptions(proxy=proxy, shape=shape, seed=seed, run=planned.file, beside=beside)
        x, y, source = wanted.examples(planned.file.model.factory, planned.model, contributions)
        print_note(f"auditing {planned.plan.allocation} on {source} …")
        subject = AuditTarget(
            model=planned.model, plan=planned.plan, losses_of=lambda x, y: planned.loss_fn(planned.model(x), y),
            hardened=planned.option("hardened") is not False,
        )  # fmt: skip
        checks = audit_step(subject, Batch(x, y), seed=seed, quick=quick)
    rows = [["check", "verdict", "at least", "claimed", "unit"]]
    for each in checks:
        rows.append([each.name, each.verdict.value, f"{each.lower_bound:.4g}", f"{each.claimed:.4g}", each.unit])
    details = [f"{each.name}: {each.detail}" for each in checks if each.detail and not each.passed]
    ok = all(each.passed for each in checks)
    facts = {"proxy": source, "passed": ok, "checks": [each.to_dict() for each in checks]}
    return Answer(facts, table(rows, left=2), *details, "passed" if ok else "FAILED: a claim is refuted", ok=ok)


app = group(__doc__, step)
app.callback()(lambda: None)  # otherwise a group of one command is that command
