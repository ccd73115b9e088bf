"""Parts of a conversion on the workers of a dask cluster: `[executor] dask` of loadplan.toml, extra `[dask]`.

Workers need the same loadplan, and see store and checkpoint under the same paths. dask sends a task of a dead worker to
another; each is an action of the store (`convert_parts`), so that running one twice makes nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loadplan.cache.error import LoadplanError
from loadplan.compiler.convert_parts import convert_part
from loadplan.compiler.part_of import PartOf

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_S = 30
_NO_WORKER_S = 120  # workers may be starting, or be replaced


class DaskError(LoadplanError, RuntimeError):
    """The dask cluster cannot be reached, or has no workers, or its workers keep dying."""


def spread(address: str, tasks: Sequence[PartOf], progress: Callable[[int, int], None] | None = None) -> None:
    """Make every part in `tasks` on the cluster at `address`.

    Args:
        address: of the scheduler, as `tcp://host:8786`.
        tasks: what to make.
        progress: called with (parts made, parts in all).

    Raises:
        DaskError: there is no cluster, or it loses its workers.
        LoadplanError: what a worker met.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise DaskError("[executor] dask needs dask.distributed; install loadplan[dask]") from error
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise DaskError(
            f"{address}: no scheduler answers; start `dask scheduler`, or take it out of loadplan.toml"
        ) from error
    with client, client.as_current():
        _run(client, address, tasks, progress)


def _run(client: Client, address: str, tasks: Sequence[PartOf], progress: Callable[[int, int], None] | None) -> None:
    from distributed import KilledWorker, wait

    pending = set(client.map(convert_part, tasks, key=[task.key for task in tasks]))
    done, last_seen_s = 0, time.monotonic()
    while pending:
        try:
            finished, pending = wait(pending, timeout=5, return_when="FIRST_COMPLETED")
        except TimeoutError:
            finished = set()
        for future in finished:
            try:
                future.result()
            except KilledWorker as error:
                raise DaskError(f"{address}: workers die of the same part ({error}); give them more memory") from error
            done += 1
            if progress is not None:
                progress(done, len(tasks))
        if client.scheduler_info(n_workers=-1)["workers"]:
            last_seen_s = time.monotonic()
        elif time.monotonic() - last_seen_s > _NO_WORKER_S:
            raise DaskError(
                f"{address}: has had no worker for {_NO_WORKER_S} s, {len(tasks) - done} of {len(tasks)} parts are not "
                "made; start workers and run again, what is made is kept"
            )
