"""Jobs on several machines: a driver divides them among workers, who hold shards of the clients."""

from atoll.runtime.engines.cluster.engine import ClusterEngine

__all__ = ["ClusterEngine"]
