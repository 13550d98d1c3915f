"""Rules of the whole test run: threads, seeds, which skips are allowed; and a PostgreSQL server for who needs one."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import postgres

# The same examples in every run: a test that fails by chance belongs into a search, not into everybody's build.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")


@pytest.fixture(scope="session", autouse=True)
def verifiers_clock() -> Iterator[None]:
    """Ledgers of the tests have times of their own, some years ahead: whoever verifies them lives later still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.ledger.verify.verifier.system_time", lambda: 4_000_000_000.0)
        yield


@pytest.fixture(autouse=True)
def nothing_planned_before() -> None:
    """Tests share data, and `make_private` remembers what a process planned for."""
    if (private := sys.modules.get("lamina.run.private")) is not None:
        private._planned.clear()


@pytest.fixture(autouse=True)
def keys_without_files() -> None:
    """Tests share keys, and a key remembers the file beside which it keeps the newest state of a ledger."""
    if (making := sys.modules.get("making")) is not None:
        for shared in vars(making).values():
            if type(shared).__name__ == "PrivateKey":
                shared.path = None


ALLOWED = Path(__file__).with_name("allowed_skips.txt")
_skipped: list[tuple[str, str]] = []


def allowed_reasons() -> tuple[str, ...]:
    lines = (line.strip() for line in ALLOWED.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _note(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _forbidden() -> list[str]:
    """One line for each skip that this run does not allow."""
    if os.environ.get("LAMINA_REQUIRE_ALL") == "1":
        return [f"{name}: {reason} (LAMINA_REQUIRE_ALL=1 allows no skip)" for name, reason in _skipped]
    known = allowed_reasons()
    return [
        f"{name}: {reason} (not in tests/{ALLOWED.name})"
        for name, reason in _skipped
        if not reason.startswith(known or ("\0",))
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _forbidden() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if lines := _forbidden():
        terminalreporter.section("skips that are not allowed", red=True)
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(autouse=True, scope="session")
def _threads() -> Iterator[None]:
    """Two threads at most, the machine that every budget in this project is stated for; one where two processes share it."""
    torch = sys.modules.get("torch")  # collected tests have imported it, if any of them uses it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global seeds; private noise never uses them."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


# folders of tiny models: a second thread only waits
ONE_THREAD = {"audit", "data", "engine", "integrations", "models", "properties", "sensitivity"}


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread where models are tiny; tests of the noise use both."""
    torch = sys.modules.get("torch")
    folder = (
        request.path.relative_to(Path(__file__).parent).parts[0]
        if Path(__file__).parent in request.path.parents
        else ""
    )
    if torch is None or folder not in ONE_THREAD or request.path.name.startswith("test_noise"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_names = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    """One PostgreSQL server for all tests; each ledger has a schema of its own."""
    import postgres

    bin = postgres.binaries()
    if bin is None:
        pytest.skip(postgres.MISSING)
    made = postgres.Server(bin)
    try:
        made.start()
        yield made
        made.stop("immediate")
    finally:
        made.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a ledger that does not exist yet, in each kind of store."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    found: postgres.Server = request.getfixturevalue("server")
    return found.url(f"test_{os.getpid()}_{next(_names)}")
