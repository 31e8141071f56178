"""What tests read of a client's samples."""

from torch import Tensor

from atoll import Task


def own(task: Task, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
    """The samples of one client, and their targets."""
    dealt = task.splits[split]
    rows = dealt.order[dealt.offsets[client] : dealt.offsets[client + 1]]
    return task.x[rows], task.y[rows]
