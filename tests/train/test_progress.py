"""What the screen shows: steps, ε rounded up, time left on a terminal; a loss only inside, and only there."""

from __future__ import annotations

import io

from refusals import raises_code
from rich.console import Console

from lamina.train.run_output import LogProgress, Progress, TerminalProgress, make_progress


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=140, highlight=False), text


def test_a_terminal_gets_a_bar_with_epsilon_and_no_loss() -> None:
    console, text = terminal()
    bar = TerminalProgress(console)
    bar.begin(0, 10)
    for step in range(1, 6):
        bar.step(step, None)
    bar.segment(5, {"clinical": 1.23411})
    bar.note("something [odd] happened")
    bar.end()
    assert "ε so far: clinical 1.235" in text.getvalue()  # up, never down
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
        lines.segment(done, {"a": done / 1000})
    found = text.getvalue().splitlines()
    assert 18 <= len(found) <= 22
    assert found[-1] == "step 1000 of 1000, ε so far: a 1.000"
    assert "0.123" not in text.getvalue() and ":" not in text.getvalue().replace("far:", "")


def test_the_right_one_is_chosen() -> None:
    assert type(make_progress(wanted=False, inside=False)) is Progress
    assert type(make_progress(wanted=True, inside=False)) is LogProgress  # tests have no terminal
    with raises_code("train.inside-needs-terminal"):
        make_progress(wanted=True, inside=True)
