"""Label inference: the head's bias tells which classes a client has.

For cross-entropy, dL/db_c = mean of p_c - share of class c. So a step, or several, gives the shares away:

    share_c = p_c - dL/db_c,      dL/db = - delta_b / (lr steps)

with p_c the mean answer of the model, exact where outputs are uniform (a head of zeros), else estimated with samples of
other clients. The label of a single sample is the class whose bias grew most. Some methods send the counts themselves.

References: Zhao, Mopuri, Bilen. "iDLG", 2020; Wainakh et al. "User-Level Label Leakage from Gradients", PoPETs 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.experiments.audit.messages import Message, other_samples, play_message
from atoll.experiments.audit.subject import Subject, answer
from atoll.kernel.params import Params
from atoll.kernel.predictor import predictor_of

Values = NDArray[np.float64]
IN_CLEAR = (("labels", "counts"), ("prototypes", "count"))  # fields and leaves that tell label counts
MOST_ASIDE = 500  # samples of others by which answers are estimated


@dataclass(frozen=True)
class Labelled:
    """How well the classes of clients were found in their first messages."""

    distance: float  # half the L1 distance between found and true shares, mean over clients
    guessing: float  # the same of the shares of all clients together
    clients: int
    worst: str  # the client whose classes are found best
    least: float  # its distance


def bias_of(message: Message) -> Tensor | None:
    """Return the change of the head's bias; None where it is not sent."""
    delta, layout = message.delta, message.network.layout
    if delta is None:
        return None
    names = [name for name in delta if name in layout.head and name.endswith("bias")]
    return delta[names[-1]].detach().double().cpu() if names else None


def infer_shares(message: Message, answers: Callable[[Params], Tensor]) -> Values | None:
    """Return the share of each class in what a message was made of; None where the head's bias is not sent."""
    told = [message.fields[field].get(leaf) for field, leaf in IN_CLEAR if field in message.fields]
    for one in told:
        if one is None:
            continue
        counts = one.double().cpu().numpy().clip(min=0)
        return np.asarray(counts / max(counts.sum(), 1e-12))
    change = bias_of(message)
    if change is None:
        return None
    delta = message.delta
    assert delta is not None
    expected = (answers(message.start) + answers(message.start + delta)) / 2 if message.steps > 1 else answers(
        message.start
    )  # fmt: skip
    shares = (expected + change / (message.training.lr * message.steps)).clamp(min=0).numpy()
    return np.asarray(shares / max(shares.sum(), 1e-12))


def estimate_answers(subject: Subject, message: Message) -> Callable[[Params], Tensor]:
    """Return what gives the mean answer of a model, estimated with samples of other clients."""
    aside = other_samples(subject, message.client)[:MOST_ASIDE]

    def answers(w: Params) -> Tensor:
        return answer((predictor_of(w), message.network), aside).softmax(1).mean(0)

    return answers


def infer_label(message: Message) -> int | None:
    """Return the class of a single sample: the one whose bias grew most; None where the head is not sent."""
    change = bias_of(message)
    return None if change is None else int(change.argmax())


def infer_labels(subject: Subject, most: int = 20) -> Labelled | None:
    """Find the classes of clients in their first messages; None where the method sends no head."""
    classes = subject.task.classes
    assert classes is not None
    clients = [int(client) for client in subject.clients[:most]]

    def count(rows: NDArray[np.int64]) -> Values:
        counts = np.bincount(subject.labels(rows), minlength=classes)
        return np.asarray(counts / counts.sum())

    everybody = count(subject.task.splits["train"].order.cpu().numpy())
    found, guessed = {}, []
    for client in clients:
        rows = subject.rows("train", client)
        message = play_message(subject, client, rows)
        shares = infer_shares(message, estimate_answers(subject, message))
        if shares is None:
            return None
        found[client] = float(np.abs(shares - count(rows)).sum() / 2)
        guessed.append(float(np.abs(everybody - count(rows)).sum() / 2))
    best = min(found, key=lambda client: found[client])
    return Labelled(
        float(np.mean([*found.values()])), float(np.mean(guessed)), len(found), subject.task.client_name(best),
        found[best],
    )  # fmt: skip
