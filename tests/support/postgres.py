"""A PostgreSQL server for tests: real, in a folder of its own, on a Unix socket, with fsync on.

PostgreSQL refuses to run as root, so under root the server runs as an unprivileged user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

MISSING = "PostgreSQL is not installed"
_SETTINGS = {
    "listen_addresses": "''",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "40",
    "shared_buffers": "64MB",
    "log_min_messages": "fatal",
}


def binaries() -> Path | None:
    """The folder with initdb and pg_ctl; the newest, where a distribution keeps several."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: int(each.parent.name), reverse=True)
    return next((each for each in folders if (each / "initdb").exists() and (each / "pg_ctl").exists()), None)


class Server:
    """Started by `start`, stopped by `stop`; `remove` takes its folder away.

    Its data lies in memory, unless it is to be `on_disk`: tests stop it, they do not cut its power.
    """

    def __init__(self, bin: Path, *, on_disk: bool = False) -> None:
        self._bin = bin
        memory = Path("/dev/shm")
        where = memory if not on_disk and os.access(memory, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="lamina-pg-", dir=where))
        self._data = self._folder / "data"
        self._as: list[str] = []
        if os.geteuid() == 0:
            user = next(name for name in ("postgres", "nobody") if _is_user(name))
            account = pwd.getpwnam(user)
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            self._as = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        self._run("initdb", "-D", self._data, "-U", "lamina", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in _SETTINGS.items())
            file.write(f"unix_socket_directories = '{self._folder}'\n")

    def url(self, schema: str = "") -> str:
        return f"postgresql://lamina@/postgres?host={self._folder}" + (f"#{schema}" if schema else "")

    def database(self, name: str) -> str:
        """The address of an empty database: runs of other people are in others."""
        for program, *options in (("dropdb", "--if-exists"), ("createdb",)):
            self._run(program, "-h", self._folder, "-U", "lamina", *options, name)
        return self.url().replace("/postgres?", f"/{name}?")

    def start(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-t", "60", "-l", self._folder / "log", "start")

    def stop(self, mode: str = "fast") -> None:
        """`immediate` is a crash: what is not on the disk is gone."""
        self._run("pg_ctl", "-D", self._data, "-w", "-t", "60", "-m", mode, "stop")

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str | Path) -> None:
        command: Sequence[str] = [*self._as, str(self._bin / program), *map(str, arguments)]
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout.decode(errors='replace')[-2000:]}")


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
