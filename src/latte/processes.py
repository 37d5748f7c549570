"""The processes of one run, one a host: how they start, agree, and end. One alone needs none of it.

A launcher says how many there are: JAX_COORDINATOR_ADDRESS (the first one's host:port),
JAX_NUM_PROCESSES and JAX_PROCESS_ID name them, or LATTE_PROCESSES=auto leaves it to JAX, which
knows TPU pods, Slurm and others.
"""

import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from latte.config import Config, settings
from latte.errors import UserError

_HASH = 8
"""Bytes of a hash that stands for a setting when processes compare theirs."""

_LINGER = 5.0
"""Seconds in which the others, that look each second, have read the last sign of the first."""

_LONG = 24 * 3600 * 1000
"""Milliseconds that processes wait for each other: who is lost is found out otherwise."""

_met: dict[str, int] = {}
"""How often processes have come to a place."""

_hosts: dict[int, str] = {}
"""Of each process that is known."""


def start(patience: int) -> None:
    """Joins the processes of the run, if there are several; call before JAX is used.

    Args:
        patience: seconds after which a process counts as lost (`latte.monitor`); JAX, which says
            less about it, waits for longer.

    Raises:
        UserError: the variables say less than they must.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    automatic = os.environ.get("LATTE_PROCESSES") == "auto"
    if not (address or automatic) or _service() is not None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    named = {}
    if address and not automatic:
        named = {
            "coordinator_address": address,
            "num_processes": _number("JAX_NUM_PROCESSES"),
            "process_id": _number("JAX_PROCESS_ID"),
        }
    jax.distributed.initialize(
        **named, heartbeat_timeout_seconds=2 * patience + 60, shutdown_timeout_seconds=patience
    )


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise UserError(
            f"{name} is {value!r}, but where JAX_COORDINATOR_ADDRESS is set it must be a number"
        )
    return int(value)


def _service() -> Any:
    """JAX's own client of the store that all processes share; None for a process alone."""
    from jax._src.distributed import global_state

    return global_state.client


def count() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def name(process: int | None = None) -> str:
    """A process for a reader: its number and its host, as far as it is known."""
    process = index() if process is None else process
    host = _hosts.get(process)
    return f"process {process}" + (f" on {host}" if host else "")


def learn_names() -> None:
    """Reads the hosts of all processes, so that they can be named without the store."""
    if len(_hosts) < count():
        _hosts.update({int(process): host for process, host in read_all("host").items()})


def meet(place: str) -> None:
    """Returns when all processes have come here, however long that takes some of them.

    By the store, not by a collective: on the CPU those give up after half a minute.
    """
    if count() > 1:
        _met[place] = _met.get(place, 0) + 1
        _service().wait_at_barrier(f"latte/{place}/{_met[place]}", _LONG)


def compile_together(function: Any) -> Callable:
    """What `jax.jit` gave, whose first run waits until all processes have compiled it."""
    programs: list[Callable] = []

    def run(*given: Any) -> Any:
        if not programs:
            programs.append(function.lower(*given).compile())
            meet("compiled")
        return programs[0](*given)

    return run


def first_says(value: bool) -> bool:
    """The first process's value, in all of them."""
    if count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def all_say(value: bool) -> bool:
    """Whether the value is true in all processes."""
    if count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def first_alone(do: Callable[[], Any]) -> None:
    """Does something in the first process while the others wait."""
    if is_first():
        do()
    meet("first alone")


# --- the store that all share --------------------------------------------------------------------


def write(key: str, value: str) -> None:
    """Leaves a value for other processes, in place of an older one."""
    service = _service()
    if service is not None:
        service.key_value_set(f"latte/{key}", value, allow_overwrite=True)


def read_all(folder: str) -> dict[str, str]:
    """What processes have left under a folder, by the rest of its key."""
    service = _service()
    found = [] if service is None else service.key_value_dir_get(f"latte/{folder}/")
    return {key.rpartition("/")[2]: value for key, value in found}


# --- the same program everywhere -----------------------------------------------------------------


def check_same(config: Config) -> None:
    """Finds out, before a step, whether all processes run the same program on the same config.

    Raises:
        UserError: one differs from the first; it and what differs are named.
    """
    if count() == 1:
        return
    write(f"host/{index()}", socket.gethostname())
    versions = {"JAX": jax.__version__, "Python": sys.version.split()[0]}
    meet("hosts")
    learn_names()
    _compare({"code of latte": _code(), **versions})
    _compare({setting.key: repr(setting.value) for setting in settings(config)})


def _compare(values: dict[str, str]) -> None:
    hashes = [hashlib.sha256(value.encode()).digest()[:_HASH] for value in values.values()]
    mine = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, _HASH)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    different = np.argwhere((everyone != everyone[0]).any(axis=-1))
    if len(different):
        process, item = map(int, different[0])
        what = list(values)[item]
        raise UserError(
            f"{name(process)} has another {what} than process 0 ({name(index())}: "
            f"{values[what][:60]}); start all processes with one command and one version"
        )


def _code() -> str:
    """A hash of this package's source."""
    package = Path(__file__).parent
    files = sorted(package.rglob("*.py"))
    whole = hashlib.sha256()
    for path in files:
        whole.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return whole.hexdigest()


# --- the end -------------------------------------------------------------------------------------


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []
"""Of signals, in C: kept as long as the process."""


def where_first_is_lost(do: Callable[[], None]) -> None:
    """Has something done before JAX's client ends this process because the first one is gone.

    The client does so as soon as the connection breaks, in a thread of its own and by abort(),
    where Python runs no handler of signals and no other thread is heard; it knows no callback from
    Python. So the handler is C's. An abort of another kind goes on as it would have.
    """
    if count() == 1 or is_first():
        return

    def handle(_: int) -> None:
        if not _first_listens():
            do()

    _handlers.append(_Handler(handle))
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, _Handler], ctypes.c_void_p
    libc.signal(signal.SIGABRT, _handlers[-1])


def _first_listens() -> bool:
    """Whether the store that all processes share can be connected to."""
    from jax._src.distributed import global_state

    host, _, port = str(global_state.coordinator_address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def leave(status: int, reason: str) -> None:
    """Ends this process at once where there are others, and tells them why; else does nothing.

    They are in the middle of a step that now never ends, so there is nothing to wait for.
    """
    if "jax" not in sys.modules or _service() is None:
        return
    say_last({"failed": reason})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say_last(sign: dict[str, str]) -> None:
    """Leaves a sign for the others; the first process, with which all signs go, lets them read."""
    write(f"beat/{index()}", json.dumps(sign))
    if is_first() and count() > 1:
        time.sleep(_LINGER)
