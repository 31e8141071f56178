"""What stands at the edge: engines and networks that packages offer by entry points, Atoll's own among them.

    [project.entry-points."atoll.engines"]
    dask = "atoll_dask:DaskEngine"

makes `atoll run ditto --engine dask:HOST:PORT` call `DaskEngine("HOST:PORT", workers=..., device=..., ...)`, which
returns an `atoll.kernel.engine.Engine`. Its `options` are those arguments with `cluster="dask"`, by which a run is
resumed. Nothing inside Atoll imports what is found here.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from atoll.kernel.errors import EngineError, first_line, unknown

ENGINES, NETWORKS = "atoll.engines", "atoll.networks"
# A folder that is imported without having been installed, or before these were named, has no entry points.
OURS = (
    EntryPoint("ray", "atoll.runtime.engines.cluster.rays:RayEngine", ENGINES),
    EntryPoint("flower", "atoll.deploy.flower", NETWORKS),
)


def list_installed(group: str) -> dict[str, EntryPoint]:
    """Return what is installed of a group, by name."""
    return {one.name: one for one in (*entry_points(group=group), *(own for own in OURS if own.group == group))}


def load_installed(group: str, name: str) -> Any:
    """Load what is installed under a name."""
    found = list_installed(group)
    if name not in found:
        raise unknown(group.removeprefix("atoll.").removesuffix("s"), name, found)
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"What is installed as {name} must be importable. It is not: {first_line(error)}",
            hint=f"{found[name].value} is what its package names; install that package again.",
        ) from error
