"""FedMD: models never travel. Clients send what theirs answer to public samples, and learn what all answer together.

    q(x) = softmax( sum_k p_k z(x; v_k) )                                      the server, of what clients sent
    v_k <- v_k - eta grad_v E_x KL( q(x) || softmax(z(x; v_k)) )               digest, on public samples x
    v_k <- v_k - eta grad_v F_k(v_k)                                           revisit, on the client's own samples

So clients learn from each other, whatever networks they have. With ``server_epochs`` the server teaches a model of its
own the same answers, as FedDF does, from uploaded logits alone:  min_w E_x KL( q(x) || softmax(z(x; w)) ).

With ``digest_epochs = 0`` every client trains alone, as `local`.

Reference: Li, Wang. "FedMD: Heterogenous Federated Learning via Model Distillation." 2019, Algorithm 1.
https://arxiv.org/abs/1910.03581
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, Positive, Replies, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.answers import Lessons, answers_to, digest
from atoll.toolbox.server.distillation import draw_public, last_of, students


@record
class State:
    """The public samples of the federation, what was answered to them, and the server's student."""

    x: Params | None = None
    wanted: Params | None = None  # q(x), from the first replies on
    w: Params | None = None


@dataclass(frozen=True, kw_only=True)
class FedMD(Algorithm):
    """Personal models that learn from each other's answers to public samples."""

    samples: Count = 500  # public samples that are answered, the same in all rounds; at most all there are
    send: Literal["logits", "probs"] = "logits"  # what is averaged
    epochs: Epochs = 1  # revisit: local epochs per round on the client's own samples
    digest_epochs: Epochs = 1  # digest: as many steps per round on public samples as these epochs have
    server_epochs: Epochs = 0  # passes of the server's student over the public samples per round; 0: no student
    server_batch: Count = 128  # samples in a step of the student
    server_lr: Positive = 1e-3  # step size of Adam on the student, annealed to 0 within a round
    weighting: Weighting = "uniform"  # p_k: the same for all, or by training samples

    needs_public_data: ClassVar[bool] = True
    mixes_architectures: ClassVar[bool] = True
    sends: ClassVar[Mapping[str, str]] = {"answers": "answers"}
    limits: ClassVar[Limits] = {"local": {"digest_epochs": 0}}
    cites: ClassVar[str] = "li2019fedmd"

    def start(self, task: Facts) -> State:
        """Return the student, if there is to be one, of a task with classes."""
        if task.classes is None:
            raise TaskError(f"Clients of FedMD exchange probabilities of classes. {task.name} has no classes.")
        return State(w=task.network.initial if self.server_epochs else None)

    def equip(self, server: State, workbench: Workbench) -> State:
        """Draw the samples that clients answer, once."""
        return replace(server, x=draw_public(workbench, self.samples))

    def broadcast(self, server: State) -> State:
        """Send the samples, and what was answered to them; never a model."""
        return replace(server, w=None)

    def local(self, received: State, cohort: Cohort) -> Update:
        """Learn what all answered last time, then from the own samples; answer, and send that alone."""
        v = self.digest(cohort.recall(default=cohort.initial), received, cohort)
        v = sgd(cohort, start=v, epochs=self.epochs)
        assert received.x is not None
        answers = answers_to(cohort, v, received.x)
        if self.send == "probs":
            answers = answers.map(lambda outputs: outputs.softmax(2))
        return Update(send={"answers": answers}, weight=cohort.weights(self.weighting), keep=v)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average what was answered, and teach the student, if there is one."""
        return self.fuse([server], replies)[0]

    def fuse(self, servers: Sequence[State], replies: Replies) -> list[State]:
        """Average over the clients of all architectures, and teach a student of each."""
        mean = replies.mean("answers")
        wanted = Params.of(wanted=mean.value.softmax(1) if self.send == "logits" else mean.value)
        benches = [replies.workbench.of_architecture(number) for number in range(len(servers))]
        return [
            replace(server, wanted=wanted, w=self.teach(server, wanted.value, bench))
            for server, bench in zip(servers, benches, strict=True)
        ]

    def teach(self, server: State, wanted: Tensor, bench: Workbench) -> Params | None:
        """Return the student after a round's passes over what was answered."""
        if server.w is None:
            return None
        assert server.x is not None
        passes = students(
            bench, server.w, server.x.value, wanted,
            epochs=self.server_epochs, batch_size=self.server_batch, lr=self.server_lr,
        )  # fmt: skip
        return last_of(passes, server.w)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model, which for one that never took part is the initial one."""
        return cohort.recall(default=cohort.initial)

    def shared(self, server: State) -> Params | None:
        """Return the server's student, if there is one."""
        return server.w

    def welcome(self, server: State, cohort: Cohort) -> Params | Stack:
        """Return the student; without one, train a new client's model on what was answered, then on its samples."""
        if server.w is not None:
            return server.w
        return sgd(cohort, start=self.digest(cohort.initial, server, cohort), epochs=self.epochs)

    def digest(self, v: Params | Stack, received: State, cohort: Cohort) -> Params | Stack:
        """Train models on what was answered, if anything was."""
        if received.wanted is None or received.x is None or not self.digest_epochs:
            return v
        return digest(cohort, v, Lessons(received.x, received.wanted), epochs=self.digest_epochs)
