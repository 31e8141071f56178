"""IFCA: K models, one per cluster; each client joins the one that fits it best, again in every round.

    j_k = argmin_j F_k(w_j),        w_j <- w_j + sum_{k: j_k = j} p_k (w_k - w_j)

w_k is w_{j_k} after `epochs` local epochs. With ``averaging = "gradients"`` clients send the gradient over all their
samples, and p_k is a share of all clients that replied, not of the cluster: small clusters take small steps. A cluster
that nobody joins stays as it is. Which clusters are found depends on where the models begin: at independent random
points, or at models of clients that are far apart. Leaves that are `common` are the same in all models, and averaged
over all clients; with all of them in common this is FedAvg.

Reference: Ghosh, Chung, Yin, Ramchandran. "An Efficient Framework for Clustered Federated Learning." NeurIPS 2020,
Algorithm 1, both options. https://arxiv.org/abs/2006.04088
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Limits, Replies, Update, Weighting, among
from atoll.kernel.clusters import Clusters
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Part, Stack, stack
from atoll.kernel.randomness import generator
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.full import full_gradient
from atoll.toolbox.client.losses import entropies, losses
from atoll.toolbox.server.clustering import choose_far_apart, distances, mixing_within, reshuffle


@record
class State:
    """All models, and which of them each client trained last, with which weight."""

    models: Stack  # one per cluster; before the first round, all starts
    cluster: Tensor  # -1 for a client that never took part
    weight: Tensor


@dataclass(frozen=True, kw_only=True)
class IFCA(Algorithm):
    """A model per cluster; clients choose theirs by its loss on their training data."""

    clusters: Annotated[Count, among(2, 3, 4, 6, 8)] = 4  # K: how many models there are
    epochs: Epochs = 1  # local epochs per round
    starts: Literal["random", "kmeans++"] = "random"  # independent points, or models of clients that are far apart
    restarts: Count = 1  # how many sets of starts to try; the one that spreads clients best over clusters is used
    averaging: Literal["models", "gradients"] = "models"  # of models, or of one gradient over all samples per round
    common: Part = "none"  # the leaves that all clusters share, such as the body
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all; shares of the cluster

    sends: ClassVar[dict[str, str]] = {"delta": "model", "cluster": "choice", "choices": "statistic"}
    limits: ClassVar[Limits] = {"fedavg": {"clusters": 1}}
    finds_clusters: ClassVar[bool] = True
    cites: ClassVar[str] = "ghosh2020efficient"

    def start(self, task: Facts) -> State:
        """Draw a set of models per restart, or the one model from which clients train to be compared."""
        if self.clusters > task.clients:
            raise HyperparameterError(
                f"`clusters` of IFCA must be at most the number of clients, {task.clients}. Got {self.clusters}."
            )
        models = [task.network.initial]
        if self.starts == "random":
            alike = models[0].part(self.common)
            models += [reshuffle(models[0], number) | alike for number in range(1, self.clusters * self.restarts)]
        nobody = torch.zeros(task.clients, device=task.sample.device)
        return State(stack(models), nobody.long() - 1, nobody)

    def broadcast(self, server: State) -> Stack:
        """Send all models."""
        return server.models

    def prepare(self, models: Stack, cohort: Cohort) -> Update | None:
        """Tell which model of each set would be joined; for k-means++, send an update of the common model.

        Whoever comes after the starts were chosen has nothing to say.
        """
        if models.clients == self.clusters:
            return None
        weight = cohort.weights(self.weighting)
        if self.starts == "kmeans++":
            w = models.client(0)
            return Update(send={"delta": sgd(cohort, start=w, epochs=max(1, self.epochs)) - w}, weight=weight)
        joined = losses(models, cohort).reshape(len(cohort), self.restarts, self.clusters).argmin(2)
        choices = torch.nn.functional.one_hot(joined, self.clusters).to(weight.dtype)
        return Update(send={"choices": Stack.of(choices=choices)}, weight=weight)

    def absorb(self, server: State, replies: Replies) -> State:
        """Choose the set whose models would be joined most evenly, or models of clients whose updates are far apart.

        If there are fewer such clients than clusters, the other models are drawn.
        """
        models = server.models
        if self.starts == "kmeans++":
            delta, w = replies.stack("delta").rows(torch.from_numpy(replies.clients.argsort())), models.client(0)
            number = min(self.clusters, delta.clients)
            chosen = choose_far_apart(distances(delta, "l2"), number, self.restarts, generator(0, "ifca"))
            trained = w + delta.rows(torch.from_numpy(chosen))
            drawn = [reshuffle(w, one) for one in range(number, self.clusters)]
            starts = [*(trained.client(one) for one in range(number)), *drawn]
            return replace(server, models=stack([one | w.part(self.common) for one in starts]))
        shares = replies.mean("choices").value
        first = int(torch.special.entr(shares).sum(1).argmax()) * self.clusters
        return replace(server, models=models.rows(slice(first, first + self.clusters)))

    def local(self, models: Stack, cohort: Cohort) -> Update:
        """Train the model that fits best, and say which one it is."""
        cluster = losses(models, cohort).argmin(1)
        w = models.rows(cluster)
        send = {"delta": self.train(w, cohort) - w, "cluster": Stack.of(cluster=cluster)}
        return Update(send=send, weight=cohort.weights(self.weighting), of_model=cluster)

    def train(self, w: Stack, cohort: Cohort) -> Stack:
        """Return the model after local epochs, or after one step along the gradient over all samples."""
        if self.averaging == "models":
            return sgd(cohort, start=w, epochs=self.epochs)
        g, after = full_gradient(cohort, w)
        return after.moved(g, -cohort.lr)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average within each cluster, what is common over all clients, and note who was where."""
        zeros = server.models.map(torch.zeros_like)
        step = replies.segment_mean("delta", by="cluster", default=zeros)
        clients, cluster, weight = replies.members
        common = mean_over_clusters(step.part(self.common), cluster, weight)
        step = (step if self.averaging == "models" else share_steps(step, cluster, weight)) | common
        return State(
            server.models + step,
            server.cluster.index_put((clients,), cluster),
            server.weight.index_put((clients,), weight.to(server.weight.dtype)),
        )

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the model that fits best on the training data; new clients choose the same way."""
        return server.models.rows(self.joined(server, cohort))

    def joined(self, server: State, cohort: Cohort) -> Tensor:
        """Find where the loss is lowest; without labels, where the model is surest, which is a heuristic."""
        measure = losses if cohort.labelled else entropies
        return measure(server.models, cohort).argmin(1)

    def mixing(self, server: State) -> Tensor:
        """Return who learns from whom: clients of a cluster from each other."""
        return mixing_within(server.cluster, server.weight)

    def found_clusters(self, server: State) -> Clusters:
        """Return which model each client has chosen last."""
        return Clusters(server.cluster.cpu().numpy())


def share_steps(means: Stack, cluster: Tensor, weight: Tensor) -> Stack:
    """Return the steps of clusters, each times the share of all weights that it has; buffers stay means."""
    shares = weight.new_zeros(means.clients).index_add(0, cluster, weight) / weight.sum()
    trained = means.trained.map(lambda leaf: shares.to(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1)) * leaf)
    return means | trained


def mean_over_clusters(means: Stack, cluster: Tensor, weight: Tensor) -> Stack:
    """Return the mean over all clients in every row, from the means of clusters; of counts the largest."""
    totals = weight.new_zeros(means.clients).index_add(0, cluster, weight) if means else weight
    shares = totals / totals.sum()

    def average(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.amax(0, keepdim=True).expand_as(leaf)
        rows = shares.to(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
        return (rows * leaf).sum(0, keepdim=True).expand_as(leaf)

    return means.map(average)
