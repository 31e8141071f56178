"""Jobs on several machines: a driver divides them among workers, who hold shards of the clients."""

from atoll.runtime.engines.cluster.engine import ClusterEngine
from atoll.runtime.engines.cluster.rays import RayEngine

__all__ = ["ClusterEngine", "RayEngine"]
