"""The demo's report: one self-contained HTML page with public figures only."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from lamina.cli.demo.picture import bars, beats, legend
from lamina.cli.demo.result import WORDS, Result

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Lamina demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
pre {{ background: #f5f5f2; padding: 1rem; overflow-x: auto; font-size: .8rem }}
.key {{ margin-right: 1.2rem }} .key i {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
</style></head><body>
<h1>A private training on simulated ECG</h1>
<p>A residual autoencoder with a classifier learned from simulated patients of two classes. {volunteers} volunteers,
mostly healthy, gave their recordings to the public and train every layer. {sensitive} sensitive patients reach only the
top quarter of the layers, the classifier, and each loses at most ε = {epsilon}.</p>

<h2>Who was let in</h2>
<p>Two hospitals signed for their patients: who contributes, which data, for which class, under which bound, until when.
{admitted} contributions were admitted. The gate refused these, and let none of them near a batch:</p>
{refused}
<p>Some sensitive patients signed a stricter bound than their class asks for. Their gradients count for less (scale),
the noise is the same for everybody, and each bound has an account of its own:</p>
{bounds}

<h2>What it was good for</h2>
<p>Measured on {test} other simulated patients, whom no training saw. All three went on from the same start on
volunteers alone, with the same steps, batches and optimiser.</p>
{utility}
<p>{legend}</p>
{bars}
<p>What the sensitive patients gave is the step from the first row to the second; what their privacy cost, noise,
clipping and the closed lower layers together, is the step from the second to the third. The private figures
differ a little from run to run: the noise is secret and new each time.</p>

<h2>What it cost</h2>
{cost}
<p>Adjacency: one patient, with all windows, added or removed. Assumes Poisson sampling with secret coins, which this
run used. Noise: {noise}. Not covered: floating-point effects of the unhardened noise. The demo's settings were chosen
on simulated patients, which costs nothing; choosing them on private data would.</p>

<h2>What an auditor finds</h2>
<p>Who was admitted, under which bound, and what was spent is in <code>ledger.db</code>: records that nobody can change
unseen, because a signed tree of hashes stands over them. It was {verified}. No data and no model are needed for that.
The first command does it again; the last shows what became of one patient's contribution:</p>
<pre>{commands}</pre>

<h2>Reconstructed beats</h2>
<p>Simulated test patients in grey, the private model's reconstruction in blue. The autoencoder learned from volunteers
alone: the sensitive class does not reach it.</p>
{beats}

<h2>The plan</h2>
<pre>{plan}</pre>

<h2>What is here, and what is not</h2>
<p>Beside this page: <code>policy.toml</code>, <code>contributions/</code> (a payload, what was signed about it and the
signature of each patient), <code>keys.json</code> (the hospitals' public keys; the private ones were forgotten),
<code>plan.json</code>, <code>RUN.toml</code> (the private run, to do again with <code>lamina train</code>),
<code>ledger.db</code> (what was admitted and spent), <code>ledger.pem</code> (the key that signs it), and
<code>run/</code> with the private model and its public figures. <code>ledger.pem</code>, <code>run/journal</code> and
<code>run/checkpoint/</code> would be secret if the patients were real.</p>
<p>No private loss, batch size or gradient norm is in this report: none of them was paid for. The beats are simulated:
no person's data is in them, and no diagnosis may rest on them. {seconds:.0f} seconds.</p>
</body></html>
"""


def write_page(folder: Path, result: Result) -> Path:
    """Write report.html into the folder; returns its path."""
    population = {entry.name: entry.population for entry in result.plan.classes}
    spent = {row[0]: row[2] for row in result.cost_rows()[1:]}
    page = _PAGE.format(
        volunteers=population["volunteer"],
        sensitive=population["sensitive"],
        epsilon=spent["sensitive"],
        test=len(result.test),
        admitted=len(result.admission),
        refused=_table(result.refusal_rows()),
        bounds=_table(result.bound_rows()),
        utility=_table(result.utility_rows()),
        legend=legend(WORDS),
        bars=bars(result.utility, WORDS),
        cost=_table(result.cost_rows()),
        noise="from a cryptographically secure stream"
        if result.outcome.private
        else "seeded, so NOT PRIVATE",
        verified=html.escape(result.evidence.words()),
        commands=html.escape("\n".join(result.evidence.commands())),
        beats=beats(result.model, result.test),
        plan=html.escape(str(result.plan)),
        seconds=result.seconds,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [_row("th", head), *(_row("td", row) for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
