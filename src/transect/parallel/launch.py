"""Start the ranks: children of this process, or, under ``torchrun``, the existing processes.

``Ranks.start(4)`` makes this process rank 0 and starts three children (``children.py``). They meet in a file in a
private folder, and gloo takes ports that the system chooses; no port is fixed. A child that ends before its time is
noticed at once: ``failure`` describes it, and registered callbacks are called.

``Ranks.join()`` is for a program that ``torchrun`` has started on every rank, on one host or several.

What the children do is a job: a function, named ``module:function``, that takes the ``World`` and an object::

    ranks = Ranks.start(2)
    ranks.call("mine:work", settings)      # on all ranks but this one ...
    work(ranks.world, settings)            # ... and here
    ranks.close()
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .children import BEGIN_S, Children, RankFailure, ended
from .gathering import start_name
from .world import World

log = logging.getLogger(__name__)

END_S = 5.0
"""Seconds for children to end by themselves."""
NOTICE_S = 2.0
"""Seconds within which the end of a child is known after a connection to it broke."""


class Ranks:
    """The ranks, seen from rank 0 (``start``) or from any of them (``join``)."""

    def __init__(self, world: World, children: dict[int, subprocess.Popen[bytes]], folder: Path | None) -> None:
        self.world = world
        self.failure: str | None = None
        """Reason of a child's early end; None if there was none."""
        self._children, self._folder = children, folder
        self._closing = self._calls = False
        self._told: list[Callable[[str], object]] = []
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()
        """Lock so that only one of ``close`` and the end of a child ends the groups."""
        for rank, child in children.items():
            threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()

    @classmethod
    def start(cls, size: int, device: str = "cpu", first_device: int = 0, children: Children | None = None) -> Ranks:
        """Make this process rank 0 of ``size``, and start the others on this host.

        Args:
            device: ``cpu``, or ``cuda``: rank i computes on GPU ``first_device`` + i.
            children: the others, where they have been started already.

        Raises:
            ValueError: there are fewer GPUs than ranks, or this process belongs to ranks already.
            RankFailure: a rank ended before it had begun.
        """
        check_devices(size, device, first_device)
        if dist.is_initialized():
            raise ValueError(
                "this process is one of several ranks already: end the engine that has them first (del llm), or start "
                "this one in another process"
            )
        children = children or Children(size)
        children.taken = True
        try:
            children.begin(device, first_device)
            world = meet(children.folder, 0, size, device, first_device)
        except BaseException:
            children.kill()
            raise
        return cls(world, children.processes, children.folder)

    @classmethod
    def join(cls, device: str = "cpu") -> Ranks:
        """Return the ranks that ``torchrun`` has started; see ``gathering.under_torchrun``.

        Raises:
            ValueError: this host has fewer GPUs than ranks.
            RankFailure: a rank has not come.
        """
        local, on_host = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        check_devices(on_host, device)
        if not dist.is_initialized():
            place = _device(device, local)
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=BEGIN_S)))
            store = dist.PrefixStore(start_name(store, rank, size), store)
            dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, **_options(place))
        return cls(World(_device(device, local)), {}, None)

    def call(self, job: str, argument: Any) -> None:
        """Let all other ranks run ``job`` (``module:function``) with their ``World`` and ``argument``, after the
        previous job. Only rank 0 calls this."""
        self._calls = True
        self.world.announce((job, argument))

    def tell(self, listener: Callable[[str], object]) -> None:
        """Register a ``listener`` that is called, in another thread, when a child ends early."""
        self._told.append(listener)

    def check(self) -> None:
        """Check that no child has ended.

        Raises:
            RankFailure: one has.
        """
        if self.failure is not None:
            raise RankFailure(self.failure)

    def explain(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of rank 0, which another rank's end may have caused."""
        if broken(error) and self._children:
            until = time.monotonic() + NOTICE_S
            while self.failure is None and time.monotonic() < until:
                time.sleep(0.01)
        if self.failure is not None:
            return RankFailure(self.failure)
        if broken(error):
            return RankFailure("another rank has ended, and this one cannot continue without it")
        return error

    def close(self) -> None:
        """End the children. May be called repeatedly."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._calls and not self._children:  # others of torchrun, whom no pipe tells
            with contextlib.suppress(RuntimeError):
                self.world.announce(None)  # the end of the job ...
                self.world.announce(None)  # ... and of jobs
        for child in self._children.values():
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        until = time.monotonic() + END_S
        for child in self._children.values():
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if dist.is_initialized():
            self._leave()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        """Release the groups. NCCL waits for CUDA graphs that hold its kernels, so on GPUs the wait is limited."""
        if self.world.device.type != "cuda":
            dist.destroy_process_group()
            return
        leaving = self._aborting
        if leaving is not None:
            leaving.join(END_S)
        if leaving is None or not leaving.is_alive():  # both at once free memory twice
            leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
            leaving.start()
            leaving.join(END_S)
        if leaving.is_alive():
            log.warning("NCCL was not released within %g s: this process can start no other ranks", END_S)

    def _abort(self) -> None:
        """End kernels that wait for an ended rank, so that this process gets its GPU back."""
        for sums in self.world.sums.values():
            if not isinstance(sums, str):
                sums.stop()
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                group._get_backend(torch.device("cuda")).abort()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the children by their ranks."""
        return {rank: child.pid for rank, child in self._children.items()}

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        with self._lock:
            if self._closing or self.failure is not None:
                return
            if self.world.device.type == "cuda":
                self._aborting = threading.Thread(target=self._abort, daemon=True)
                self._aborting.start()
            failure = self.failure = ended(rank, child.pid, code, self._folder)  # who sees it may close at once
        for listener in self._told:
            listener(failure)


def check_devices(size: int, device: str, first_device: int = 0) -> None:
    """Check that there is a device for each rank of this host.

    Raises:
        ValueError: there are fewer GPUs.
    """
    if device == "cuda" and first_device + size > torch.cuda.device_count():
        raise ValueError(
            f"{size} ranks from GPU {first_device} on need {first_device + size} GPUs, and torch sees "
            f"{torch.cuda.device_count()}: ask for fewer ranks, or give device='cpu'"
        )


def meet(folder: Path, rank: int, size: int, device: str, first_device: int) -> World:
    """Join the ranks that meet in ``folder``; returns when all are there."""
    store = dist.FileStore(str(folder / "store"), size)
    place = _device(device, first_device + rank)
    lonely = "GLOO_SOCKET_IFNAME" not in os.environ
    if lonely:  # all ranks are here; the host's name may lead anywhere
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, **_options(place))
        return World(place)
    finally:
        if lonely:
            del os.environ["GLOO_SOCKET_IFNAME"]


def broken(error: BaseException) -> bool:
    """Return True if an error reports a broken connection to another rank, which then has ended."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "Broken pipe", "NCCL"))


def _backend(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def _options(place: torch.device) -> dict[str, Any]:
    # A warning to all who send from stage to stage, whose groups do nothing else.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    return {"timeout": timedelta(seconds=BEGIN_S), **({"device_id": place} if place.type == "cuda" else {})}


def _device(device: str, index: int) -> torch.device:
    if device != "cuda":
        return torch.device(device)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
