"""What the screen shows: steps, ε rounded up, time left on a terminal; a loss only inside, and only there."""

from __future__ import annotations

import io

from refusals import raises_code
from rich.console import Console

from lamina.run.run_output import LogProgress, Progress, RunFigures, TerminalProgress, make_progress


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=140, highlight=False), text


def test_a_terminal_gets_a_bar_with_epsilon_and_no_loss() -> None:
    console, text = terminal()
    bar = TerminalProgress(console)
    bar.begin(0, 10)
    for step in range(1, 6):
        bar.step(step, None)
    now = RunFigures(step=5, steps=10, epsilon={"clinical": 1.23411}, evaluation={"acc": 0.517})
    bar.on_evaluation(now)
    bar.on_segment(now)
    bar.note("something [odd] happened")
    bar.end()
    assert "ε 1.235" in text.getvalue()  # up, never down
    assert "acc 0.517" in text.getvalue()
    assert "5/10" in text.getvalue()
    assert "something [odd] happened" in text.getvalue()
    assert "loss" not in text.getvalue()


def test_a_loss_is_shown_only_if_it_is_passed() -> None:
    console, text = terminal()
    bar = TerminalProgress(console)
    bar.begin(0, 2)
    bar.step(1, 0.5)
    bar.end()
    assert "raw loss 0.5 (inside only)" in text.getvalue()


def test_a_log_gets_some_twenty_lines_without_times() -> None:
    text = io.StringIO()
    lines = LogProgress(Console(file=text, width=140, highlight=False))
    lines.begin(0, 1000)
    for done in range(1, 1001):
        lines.step(done, 0.123)
        lines.on_segment(RunFigures(step=done, steps=1000, epsilon={"a": done / 1000}))
    found = text.getvalue().splitlines()
    assert 18 <= len(found) <= 22
    assert found[-1] == "step 1000 of 1000, ε 1.000"
    assert "0.123" not in text.getvalue() and ":" not in text.getvalue()


def test_a_log_line_has_the_evaluation_and_epsilon_by_class() -> None:
    text = io.StringIO()
    lines = LogProgress(Console(file=text, width=140, highlight=False))
    lines.begin(0, 180)
    for step, evaluation in ((18, {}), (36, {"acc": 0.517}), (54, {})):
        now = RunFigures(step=step, steps=180, epsilon={"a": 1.31, "b": 0.2}, evaluation=evaluation)
        if evaluation:
            lines.on_evaluation(now)
        lines.on_segment(now)
    assert text.getvalue().splitlines() == [
        "step 18 of 180, ε a 1.310, b 0.200",
        "step 36 of 180, ε a 1.310, b 0.200, acc 0.517",
        "step 54 of 180, ε a 1.310, b 0.200",
    ]


def test_the_right_one_is_chosen() -> None:
    assert type(make_progress(wanted=False, inside=False)) is Progress
    assert type(make_progress(wanted=True, inside=False)) is LogProgress  # tests have no terminal
    with raises_code("train.inside-needs-terminal"):
        make_progress(wanted=True, inside=True)
