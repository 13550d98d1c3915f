"""Figures for people are rounded to the safe side: no table prints less lost, or more protection, than there is."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import lamina
from lamina.account.charges import Account
from lamina.admit.resolver import resolve
from lamina.admit.terms import SigningTerms
from lamina.allocate.make_plan import make_plan
from lamina.cli.layer_figures import layer_figures, layer_table
from lamina.cli.spend import figures_of, spend_page
from lamina.plan.layer_stack import LayerStack
from lamina.plan.policy import Policy
from lamina.plan.step_plan import StepPlan
from lamina.plan.table import at_least, at_most, epsilon_text, remaining_text

FIGURES = st.floats(0, 1e12, allow_subnormal=False)


@given(FIGURES, st.integers(1, 6))
@example(1.1, 4)
@example(0.0, 4)
@example(12345.6, 4)
@example(5e-324, 4)
def test_each_figure_is_rounded_to_its_side_and_by_little(value: float, digits: int) -> None:
    for up, down in ((epsilon_text, remaining_text), (at_most, at_least)):
        low, high = float(down(value, digits)), float(up(value, digits))
        assert low <= value <= high
        step = max(10.0**-digits, 1e-3 * value) if up is epsilon_text else 10.0 ** (1 - digits) * value
        assert high - low <= 1.001 * step
        assert float(up(high, digits)) == high and float(down(low, digits)) == low  # what is round stays


@given(FIGURES, FIGURES)
def test_what_keeps_a_bound_looks_as_if_it_did(one: float, other: float) -> None:
    less, more = sorted((one, other))
    for text in (epsilon_text, remaining_text, at_most, at_least):
        assert float(text(less)) <= float(text(more))


def test_what_is_not_finite_is_said() -> None:
    assert epsilon_text(math.inf) == at_most(math.inf) == "∞"


POLICY = """
[corpus]
origin = "t"
delta = 1e-5
[class.a]
population = 1000
epsilon = {epsilon}
clip_norm = 0.77777
profile = {{ top = 0.5 }}
[class.b]
population = 777
epsilon = 3.33333
"""


@pytest.fixture(scope="module", params=[1.07034, 2.71828])
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy.parse(POLICY.format(epsilon=request.param))


@pytest.fixture(scope="module")
def plan(policy: Policy) -> StepPlan:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return make_plan(LayerStack.from_model(model), policy, batch=77, steps=33)


def rows(table: str, title: str) -> list[dict[str, str]]:
    """The rows under the first line that begins with `title`, by column; columns are two blanks apart."""
    lines = table.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(title))
    head = re.split(r"\s{2,}", lines[at].strip())
    found = []
    for line in lines[at + 1 :]:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) != len(head):
            break
        found.append(dict(zip(head, cells, strict=True)))
    return found


def test_the_table_of_a_plan(plan: StepPlan) -> None:
    for table in (str(plan), layer_table(plan, layer_figures(plan, None))):
        layers = rows(table, "layer")
        assert len(layers) == len(plan.layers)
        for i, row in enumerate(layers):
            assert float(row["noise S"]) <= plan.noise[i]
            for k, entry in enumerate(plan.classes):
                shown = row[f"C {entry.name}"]
                assert shown == "-" if not plan.clip[k][i] else float(shown) >= plan.clip[k][i]
    for k, row in enumerate(rows(str(plan), "class")):
        assert float(row["rate q"]) >= plan.classes[k].sampling_rate
        assert float(row["sigma"]) <= plan.sigma(k)
        assert float(row["ε"]) >= plan.epsilon(k)


@pytest.mark.parametrize("z", [1_234_567, 2_222_222, 5_555_555])
def test_the_table_of_signed_bounds(policy: Policy, plan: StepPlan, z: int) -> None:
    given = [Account(cls, c, z) for cls in "ab" for c in (777_777, 123_456)]
    for cls in "ab":  # the class's own terms, to a millionth: here noise and floor nearly meet
        terms = SigningTerms.make(policy, cls, not_before=0, expires=1)
        given.append(Account(cls, terms.clip_norm, terms.noise_multiplier))
    resolution = resolve(given, policy, plan)
    shown = rows(str(resolution), "class")
    assert len(shown) == len(resolution.entries)
    for row, entry in zip(shown, resolution.entries, strict=True):
        assert entry.variance_floor <= entry.variance  # also in full
        assert float(row["floor"]) <= float(row["variance"]) <= entry.variance
        assert entry.epsilon <= float(row["ε spent"]) <= float(row["ε signed"])
        assert float(row["scale"]) >= entry.scale
        assert float(row["c"]) >= entry.bound.c and float(row["z"]) <= entry.bound.z


@pytest.mark.parametrize("bound", [1.07034, 1.07036, 1.1, 6.0])
@pytest.mark.parametrize("below", [0.0, 1e-9, 1e-5, 0.3])
def test_the_table_of_what_is_spent(bound: float, below: float) -> None:
    committed = bound - below
    figures = figures_of(committed, committed, bound) | {"delta": 1e-5, "accountant": "pld", "runs": []}
    (row,) = rows(spend_page("t", [(Account("a"), figures)]), "class")
    assert committed <= float(row["ε spent"]) == float(row["committed"]) <= float(row["bound"])
    assert float(row["remains"]) <= bound - committed


# Every other table prints through the same functions: no figure of privacy has a format of its own.
SOURCE = Path(lamina.__file__).parent
PRIVACY = re.compile(
    r"epsilon|sigma|noise|clip|variance|\brho\b|spent|committed|remaining|\bbound\b|\bscale\b|signed|multiplier"
)
PAGES = ["plan/table.py", "admit/resolver.py", "run/publisher.py", "run/run_output.py"]


@pytest.mark.parametrize(
    "name", [*PAGES, *(str(p.relative_to(SOURCE)) for p in sorted((SOURCE / "cli").rglob("*.py")))]
)
def test_no_table_has_a_rounding_of_its_own(name: str) -> None:
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            what, spec = ast.unparse(node.value), ast.unparse(node.format_spec)
            if re.search(r"\.?\d*[fge]'$", spec):
                assert not PRIVACY.search(what), f"{name}:{node.lineno}: {what} is rounded by {spec}"
