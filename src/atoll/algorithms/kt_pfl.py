"""KT-pFL: every client learns from a mixture of all clients' answers that is its own; no model travels.

    server:  s_k(x) = softmax(z(x; v_k)),    q_k(x) = sum_j c_kj s_j(x)                           for public samples x
             c_k <- c_k - eta_c grad [ E_x KL( q_k(x) || s_k(x) ) + rho ||c_k - 1/N||^2 ],      back to the simplex
    client:  v_k <- v_k - eta grad E_x KL( q_k(x) || softmax(z(x; v_k)) )                       digest
             v_k <- v_k - eta grad F_k(v_k)                                                     revisit

So clients teach each other pair by pair: c_kj is how much k learns from j. It grows for those who answer as k does, and
rho pulls it towards 1/N, with which this is FedMD of probabilities. N counts who has answered so far. With
``digest_epochs = 0`` every client trains alone, as `local`.

Reference: Zhang, Guo, Ma, Wang, Xu, Wu. "Parameterized Knowledge Transfer for Personalized Federated Learning."
NeurIPS 2021. https://arxiv.org/abs/2111.02862
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, Natural, NonNegative, Replies, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack, widest
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.answers import Lessons, answers_to, digest
from atoll.toolbox.server.distillation import draw_public
from atoll.toolbox.server.mixing import mark_seen, mean_for_unseen, mix_models, require_pairs, write_rows
from atoll.toolbox.server.simplex import nearest


@record
class Asked:
    """What all clients receive: the public samples."""

    x: Params


@record
class Taught:
    """What each client receives: what it is to learn about them, q_k."""

    q: Stack


@record
class State:
    """The public samples, everybody's last answers to them, and who learns from whom."""

    c: Tensor  # 1/N in the column of a client that has not answered yet
    seen: Tensor  # who has answered
    x: Params | None = None
    s: Stack | None = None  # probabilities of classes, zeros for who has not answered


@dataclass(frozen=True, kw_only=True)
class KTpFL(Algorithm):
    """Personal models that learn from each other's answers, each from some more than from others."""

    samples: Count = 500  # public samples that are answered, the same in all rounds; at most all there are
    epochs: Epochs = 1  # revisit: local epochs per round on the client's own samples
    digest_epochs: Annotated[Epochs, Search(among=(1, 2, 5))] = 1  # digest: as many steps as these epochs have
    coefficient_pull: Annotated[NonNegative, Search(0.01, 10, log=True)] = 0.7  # ρ: towards equal coefficients
    coefficient_lr: NonNegative = 0.01  # η_c: step size of the coefficients
    coefficient_steps: Natural = 10  # steps of the coefficients per round

    needs_public_data: ClassVar[bool] = True
    mixes_architectures: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False
    needs_unicast: ClassVar[bool] = False
    sends: ClassVar[Mapping[str, str]] = {"answers": "answers"}
    limits: ClassVar[Limits] = {"local": {"digest_epochs": 0}}
    cites: ClassVar[str] = "zhang2021parameterized"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls the coefficients to equal ones."""
        return {"2 * coefficient_lr * coefficient_pull": 2 * self.coefficient_lr * self.coefficient_pull}

    def start(self, task: Facts) -> State:
        """Begin with equal coefficients, on a task with classes."""
        if task.classes is None:
            raise TaskError(f"Clients of KTpFL exchange probabilities of classes. {task.name} has no classes.")
        device, size = task.sample.device, task.clients
        require_pairs(size, widest(device), device)
        c = torch.full((size, size), 1 / size, dtype=widest(device), device=device)
        return State(c, seen=torch.zeros(size, dtype=torch.bool, device=device))

    def equip(self, server: State, workbench: Workbench) -> State:
        """Draw the samples that clients answer, once."""
        return replace(server, x=draw_public(workbench, self.samples))

    def broadcast(self, server: State) -> Asked:
        """Send the samples."""
        assert server.x is not None, "the server has drawn no samples"
        return Asked(server.x)

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Taught | None:
        """Send what each client is to learn, once somebody has answered."""
        if server.s is None:
            return None
        rows = self.mixing(server, torch.from_numpy(ids).to(server.c.device))
        return Taught(mix_models(rows.to(server.s.value), server.s))

    def local(self, asked: Asked, cohort: Cohort) -> Update:
        """Learn the own mixture of last time's answers, then from the own samples; answer, and send that alone."""
        v = cohort.recall(default=cohort.initial)
        if cohort.received is not None:
            v = self.learn(v, Lessons(asked.x, Stack.of(wanted=cohort.received.q.value)), cohort)
        v = sgd(cohort, start=v, epochs=self.epochs)
        return Update(send={"answers": answers_to(cohort, v, asked.x)}, keep=v)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Hold everybody's last answers, and learn who is worth listening to."""
        return self.fuse([server], replies)[0]

    def fuse(self, servers: Sequence[State], replies: Replies) -> list[State]:
        """Do so over the clients of all architectures."""
        server, answers = servers[0], replies.stack("answers")
        s = write_rows(server.s, Stack.of(s=answers.value.softmax(2)), replies.clients, len(server.c))
        seen = mark_seen(server.seen, replies.clients)
        c = self.improve(server.c, s.value, seen)
        return [replace(one, c=c, seen=seen, s=s) for one in servers]

    def improve(self, c: Tensor, s: Tensor, seen: Tensor) -> Tensor:
        """Take steps of the coefficients between those who have answered; s is [client, sample, class, ...]."""
        there = seen.nonzero()[:, 0]
        size, answers = len(there), s[0].numel() // s.shape[2]  # a text has one for each place
        s = s[there].to(c.dtype).flatten(1)
        log_s = s.clamp(min=torch.finfo(s.dtype).tiny).log()
        pairs = there[:, None], there
        # Those who have not answered yet have 1/N each, so the others' coefficients sum to the rest.
        mine = c[pairs] * (len(c) / size)
        for _ in range(self.coefficient_steps):
            q = mine @ s
            apart = q.clamp(min=torch.finfo(q.dtype).tiny).log() - log_s
            pull = 2 * self.coefficient_pull * (mine - 1 / size)
            slope = apart @ s.T / answers + pull  # but for what is the same for all j
            mine = nearest(mine - self.coefficient_lr * slope)
        return c.index_put(pairs, mine * (size / len(c)))

    def mixing(self, server: State, clients: Tensor | None = None) -> Tensor:
        """Return c over those who have answered; a client that has not learns from all of them alike."""
        there = (server.c if clients is None else server.c[clients]) * server.seen
        return mean_for_unseen(there / there.sum(1, keepdim=True).clamp(min=1e-300), server.seen, clients)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return nothing of others: these clients' models are their own."""
        return replace(
            server, c=torch.full_like(server.c, 1 / len(server.c)), seen=torch.zeros_like(server.seen), s=None
        )

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model, which for one that never took part is the initial one."""
        return cohort.recall(default=cohort.initial)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Train a new client's model on the mean of what all answered, then on its samples."""
        v = cohort.stacked(cohort.initial)
        if server.s is not None and server.x is not None:
            mean = Params.of(wanted=server.s.value[server.seen].mean(0))
            v = self.learn(v, Lessons(server.x, mean), cohort)
        return sgd(cohort, start=v, epochs=self.epochs)

    def learn(self, v: Stack, lessons: Lessons, cohort: Cohort) -> Stack:
        """Digest the lessons, if there is time for it."""
        return digest(cohort, v, lessons, epochs=self.digest_epochs) if self.digest_epochs else v
