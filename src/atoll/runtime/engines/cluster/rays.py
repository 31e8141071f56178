"""Ray: its actors are the workers of a cluster. Extra `cluster`.

Whoever can reach a Ray cluster can run code on it: it is one trust domain, and never spans data owners.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from atoll.algorithms import FROM_FILES
from atoll.kernel.errors import AtollError, EngineError, first_line
from atoll.kernel.network import Precision
from atoll.kernel.params import Tree
from atoll.kernel.sources import code_digest
from atoll.runtime.engines.cluster.engine import ClusterEngine, WorkerLost
from atoll.runtime.engines.cluster.messages import Message, Order
from atoll.runtime.engines.cluster.worker import Epochs, Errand, Worker
from atoll.runtime.engines.local import LocalEngine

log = logging.getLogger("atoll.engine")

T = TypeVar("T")
OBJECT_STORE = 512 * 2**20  # bytes of shared memory, where a cluster is started here; beyond, Ray writes to disk
REACHING = 5.0  # seconds to reach an address
CONNECTING = 30.0  # seconds to join a cluster that was reached
STARTING = 120.0  # seconds until the first workers are there
ROOM = 5.0  # seconds to wait for room for a worker in place of another one
LOOKING = 0.5  # seconds between two looks at long training


class Hand(Worker):
    """A worker as Ray runs it."""

    def __init__(self, options: dict[str, Any], dtype: torch.dtype, cores: int) -> None:
        super().__init__(options, dtype, cores)
        torch.set_num_threads(cores)

    def introduce(self) -> tuple[str, int, str]:
        """Return the code, the process and the machine of this worker."""
        return code_digest(), os.getpid(), socket.gethostname()


def import_ray() -> Any:
    """Import Ray; raise EngineError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers without GPUs see what the driver sees
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "A cluster needs Ray, which is not installed.", hint="pip install 'atoll[cluster]'."
        ) from error
    return ray


class RayCrew:
    """Actors of a Ray cluster; see `Crew`. Without an address a cluster is started on this machine."""

    def __init__(
        self,
        address: str | None,
        make: tuple[dict[str, Any], torch.dtype],
        *,
        workers: int | None,
        cores: int,
        gpus: float | None,
        object_store_memory: int,
    ) -> None:
        self._ray = import_ray()
        self._make, self._cores = make, cores
        self._mine = not self._ray.is_initialized()
        if self._mine:
            self._join(address, workers, cores, object_store_memory)
        there = self._ray.cluster_resources()
        self._gpus = float(there.get("GPU", 0) > 0) if gpus is None else gpus
        room = there.get("GPU", 0) / self._gpus if self._gpus else there.get("CPU", 1) / cores
        self._hands: dict[int, Any] = {}
        self._last = -1
        count = max(1, int(room)) if workers is None else workers
        self._start(count)
        log.info("%d workers on %d machine(s)", count, len([one for one in self._ray.nodes() if one["Alive"]]))

    # -- the cluster -------------------------------------------------------------------------------------------------
    def _join(self, address: str | None, workers: int | None, cores: int, object_store_memory: int) -> None:
        """Join a cluster, or start one here."""
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        address = address or os.environ.get("RAY_ADDRESS")
        if address is None:
            size = {"num_cpus": workers * cores} if workers is not None else {}
            quiet |= {"include_dashboard": False, "object_store_memory": object_store_memory, **size}
            self._connect(address, quiet)
            return
        if address != "auto":
            require_reachable(address)
        self._connect(address, quiet)

    def _connect(self, address: str | None, options: dict[str, Any]) -> None:
        """Call `ray.init`; where something else than Ray answers it would wait for ever, and is given some seconds."""
        found: list[BaseException | None] = []

        def connect() -> None:
            try:
                self._ray.init(address=address or "local", **options)  # without a word it would join what it finds
                found.append(None)
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                found.append(error)

        if address is None:
            connect()  # in this thread: what it starts ends with the thread that started it
        else:
            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            thread.join(CONNECTING)
        error = found[0] if found else TimeoutError(f"no answer within {CONNECTING:g} s")
        if isinstance(error, Exception):
            where = "here" if address is None else f"at {address}"
            raise EngineError(
                f"A Ray cluster must be running {where}. It could not be joined: {first_line(error)}",
                hint="`ray status` says whether it is up; versions of Ray and Python must be the same everywhere.",
            ) from error
        if error is not None:
            raise error

    def _start(self, count: int) -> None:
        """Start the first workers, all at once."""
        numbers = [self._launch() for _ in range(count)]
        hellos = {number: self._hands[number].introduce.remote() for number in numbers}
        ready, missing = self._ray.wait([*hellos.values()], num_returns=count, timeout=STARTING)
        if missing:
            self.close()
            raise EngineError(
                f"There must be room for {count} worker(s) with {self._needs}. {len(ready)} started within "
                f"{STARTING:g} s; the cluster has {self._describe()}.",
                hint="ask for fewer workers: `workers=`.",
            )
        for hello in hellos.values():
            try:
                self._require_same_code(self._ray.get(hello))
            except self._ray.exceptions.RayError as error:
                self.close()
                raise self._explain(error) from error

    def _require_same_code(self, hello: tuple[str, int, str]) -> None:
        code, _, machine = hello
        if code != code_digest():
            self.close()
            raise EngineError(
                f"All machines of a cluster must have the same Atoll. {machine} has another one: its code is {code}, "
                f"here it is {code_digest()}.",
                hint="install the same version there, and start Ray again.",
            )

    def _launch(self) -> int:
        """Ask for one more worker; return its number."""
        options, dtype = self._make
        remote = self._ray.remote(concurrency_groups={"control": 1})(Hand).options(
            num_cpus=self._cores, num_gpus=self._gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        self._last += 1
        self._hands[self._last] = remote.remote(options, dtype, self._cores)
        return self._last

    @property
    def _needs(self) -> str:
        return f"{self._cores} core(s)" + (f" and {self._gpus:g} GPU(s)" if self._gpus else "") + " each"

    def _describe(self) -> str:
        there = self._ray.cluster_resources()
        return f"{there.get('CPU', 0):g} core(s) and {there.get('GPU', 0):g} GPU(s)"

    def close(self) -> None:
        """Let the workers go, and end Ray if it was started for them."""
        for hand in self._hands.values():
            with contextlib.suppress(Exception):
                self._ray.kill(hand)
        self._hands.clear()
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    # -- messages ----------------------------------------------------------------------------------------------------
    @property
    def workers(self) -> Sequence[int]:
        """The workers that are there."""
        return [*self._hands]

    def processes(self) -> dict[int, int]:
        """Return the process of each worker, on its machine."""
        return {number: self._wait(hand.introduce.remote())[1] for number, hand in self._hands.items()}

    def share(self, value: Any) -> Any:
        """Put a value into Ray's store."""
        return self._send(lambda: self._ray.put(value))

    def _send(self, send: Callable[[], T]) -> T:
        """Call Ray with values that travel; raise EngineError for those that cannot."""
        for name, module in [*sys.modules.items()]:  # other machines do not have a user's file
            if name.startswith(f"{FROM_FILES}."):
                with contextlib.suppress(ValueError):
                    self._ray.cloudpickle.register_pickle_by_value(module)
        try:
            return send()
        except (TypeError, AttributeError, self._ray.cloudpickle.PicklingError) as error:
            reason = error.__cause__ or error  # Ray's own begins with all that was to be sent
            raise EngineError(
                "Task, model and method must be such that they can be sent to workers. They cannot: "
                f"{str(reason).splitlines()[0]}.",
                hint="a model, loss or method must not hold locks, open files, generators or connections.",
            ) from error

    def hold(self, worker: int, key: Hashable, cargo: Any, kept: Any, *more: Any) -> Any:
        """Send a shard to a worker."""
        return self._send(lambda: self._hand(worker).hold.remote(key, cargo, kept, *more))

    def settle(self, worker: int, pending: Any) -> None:
        """Wait until a worker holds a shard."""
        self._wait(pending)

    def run(self, worker: int, key: Hashable, order: Order, broadcast: Any) -> Iterator[Message | None]:
        """Begin an order now; its messages are read later."""
        try:
            streamed = self._hand(worker).run.options(num_returns="streaming")
            stream = self._send(lambda: streamed.remote(key, order, broadcast))
        except WorkerLost as error:
            return self._fail(error)
        return self._read(stream)

    def _fail(self, error: WorkerLost) -> Iterator[Any]:
        """Raise when it is read."""
        yield from ()
        raise error

    def _read(self, stream: Any) -> Iterator[Any]:
        """Yield the messages of a stream, and None whenever there is none for a while."""
        while True:
            with self._losing():
                ready, _ = self._ray.wait([stream], timeout=LOOKING, fetch_local=False)
                if ready:
                    try:
                        message = self._ray.get(next(stream))
                    except StopIteration:
                        return
            yield message if ready else None

    def do(self, worker: int, errand: Errand[Any], item: Any) -> Iterator[Any]:
        """Send a worker on an errand."""
        streamed = self._hand(worker).do.options(num_returns="streaming")
        return self._read(self._send(lambda: streamed.remote(errand, item)))

    def abandon(self, worker: int, order: int) -> None:
        """Tell a worker that nobody waits for an order any more."""
        if worker in self._hands:
            self._hands[worker].abandon.options(concurrency_group="control").remote(order)

    def follow(self, worker: int, *, stop: bool) -> list[Epochs]:
        """Ask a worker how far its long training is."""
        epochs: list[Epochs] = self._wait(self._hand(worker).follow.options(concurrency_group="control").remote(stop))
        return epochs

    def plans(self, worker: int, key: Hashable, method: Hashable) -> list[Tree]:
        """Ask a worker how a method's jobs run there."""
        plans: list[Tree] = self._wait(self._hand(worker).plans.remote(key, method))
        return plans

    def forget(self) -> None:
        """Have all workers let go of what they hold."""
        for hand in self._hands.values():
            hand.forget.remote()

    def _hand(self, worker: int) -> Any:
        if worker not in self._hands:
            raise WorkerLost("it is gone")
        return self._hands[worker]

    def _wait(self, reference: Any) -> Any:
        with self._losing():
            return self._ray.get(reference)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Turn what Ray says about lost workers and machines into WorkerLost."""
        errors = self._ray.exceptions
        lost = (
            errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError,
            errors.OutOfMemoryError,
        )  # fmt: skip
        try:
            yield
        except lost as error:
            raise WorkerLost(first_line(error)) from error
        except errors.RayError as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        """Return an error of Ray as one of Atoll."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, AtollError):
            return cause
        return EngineError(
            f"Workers must be able to read what they are sent. One failed: {str(error).strip().splitlines()[-1]}",
            hint="the modules of your model and method must be installed on all machines.",
        )

    # -- workers that die ----------------------------------------------------------------------------------------------
    def replace(self, worker: int) -> int:
        """Return a new worker in place of one that is lost; if there is no room for one, one of the others."""
        if worker in self._hands:
            with contextlib.suppress(Exception):
                self._ray.kill(self._hands.pop(worker))
            self._hands.pop(worker, None)
        number = self._launch()
        hello = self._hands[number].introduce.remote()
        began = time.monotonic()
        while time.monotonic() - began < STARTING:
            ready, _ = self._ray.wait([hello], timeout=1.0)
            if ready:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._require_same_code(self._ray.get(hello))
                    return number
                break
            if time.monotonic() - began > ROOM and not self._has_room():
                break
        self._ray.kill(self._hands.pop(number))
        for other in self.workers:
            hello = self._hands[other].introduce.options(concurrency_group="control").remote()
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(hello, timeout=ROOM)
                log.warning("there is no room for another worker: one of the others takes over the clients")
                self._hands[other] = self._hands.pop(other)  # the next time it is another one's turn
                return other
        raise EngineError(
            f"A cluster must have a worker. All are gone, and there is no room for another one with {self._needs}.",
            hint="start a machine and continue with `atoll resume`.",
        )

    def _has_room(self) -> bool:
        """Return whether the machines that are left have room for all workers."""
        there, workers = self._ray.cluster_resources(), len(self._hands)
        return bool(there.get("CPU", 0) >= workers * self._cores and there.get("GPU", 0) >= workers * self._gpus)


def require_reachable(address: str) -> None:
    """Raise EngineError within seconds if nobody listens at an address."""
    host, colon, port = address.rpartition(":")
    if "//" in address or not colon or not host or not port.isdigit():
        raise EngineError(
            f"The address of a Ray cluster must be HOST:PORT, that of its head node, or auto. Got {address!r}.",
            hint="`ray start` prints it on the head node; its port is 6379 by default.",
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACHING).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"A Ray cluster must be reachable at {address}. It is not: {first_line(error)}.",
            hint="start it with `ray start` on the head node, or check host, port and firewall.",
        ) from error


class RayEngine(ClusterEngine):
    """Runs jobs on a Ray cluster: workers hold shards of the clients and run a `LocalEngine` on them.

    `address` is HOST:PORT of the cluster's head node, or `auto`; without one, a cluster is started on this machine (or
    $RAY_ADDRESS is joined). There are as many `workers` as the cluster has GPUs, or groups of `cores` if it has none;
    each has `gpus` GPUs. All else is as for `LocalEngine`. Use it in a `with` statement, or call `close()`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        cores: int = 1,
        gpus: float | None = None,
        device: str = "auto",
        strategy: str = "auto",
        compile: bool | None = None,  # noqa: A002 - the word users know
        precision: Precision = "fp32",
        dtype: torch.dtype = torch.float32,
        timeout: float | None = None,
        remember: bool = True,
        object_store_memory: int = OBJECT_STORE,
    ) -> None:
        for name, value in (("workers", workers), ("cores", cores)):
            if value is not None and value < 1:
                raise EngineError(f"`{name}` must be at least 1. Got {value!r}.")
        asked: dict[str, Any] = {
            "device": device, "strategy": strategy, "compile": compile, "precision": precision, "timeout": timeout,
        }  # fmt: skip
        here = "cpu" if device.startswith("cuda") and not torch.cuda.is_available() else device
        local = LocalEngine(**{**asked, "device": here}, dtype=dtype, remember=remember)
        crew = RayCrew(
            address, ({**asked, "remember": remember}, dtype), workers=workers, cores=cores, gpus=gpus,
            object_store_memory=object_store_memory,
        )  # fmt: skip
        super().__init__(crew, local)
        self._options = {"cluster": "ray", "address": address, "workers": workers, "cores": cores, "gpus": gpus} | asked

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for, as it is written into a run's configuration."""
        return self._options

    def close(self) -> None:
        """Let the workers go, and end Ray if it was started for them."""
        self.crew.close()  # type: ignore[attr-defined]

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
