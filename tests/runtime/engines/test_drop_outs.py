"""A cohort with drop-outs runs the programs of the full one, on rows that nothing reads."""

import numpy as np
import pytest
import torch
from torch import nn

from atoll.kernel.cohort import Cohort
from atoll.runtime.engines.measuring import FORCED
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.toolbox.client import proximal, sgd


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))


def trained(task, clients, programs, mode, nominal):
    population = Population(task, RamMemory(task.clients), 0)
    scanner = Scanner(population, Plan(mode=mode), programs, nominal=nominal, calls=FORCED)
    cohort = Cohort(population.facts, np.asarray(clients), 0, scanner)
    own = sgd(cohort, start=cohort.initial, epochs=1)
    # the second call is given a value per client, which must be padded as well
    return sgd(cohort, start=cohort.initial, epochs=2, penalty=proximal(0.3, center=own))


@pytest.mark.parametrize("model", [None, with_dropout])
def test_padded_rows_change_nothing(make_task, model):
    task = make_task(model, sizes=(5, 1, 12, 7, 3, 9, 2, 4), dtype=torch.float64)
    left = [2, 5, 3, 0, 7]  # three of eight are lost
    plain = trained(task, left, Programs(), "eager", nominal=5)
    padded = trained(task, left, Programs(), "traced", nominal=8)
    assert padded.clients == 5
    assert all(torch.equal(padded[name], plain[name]) for name in plain)


def test_no_new_program_is_made_when_clients_drop_out(make_task):
    task, programs = make_task(sizes=(8,) * 8), Programs()
    trained(task, range(8), programs, "traced", nominal=8)
    made = len(programs._made)
    trained(task, range(7), programs, "traced", nominal=8)
    assert len(programs._made) == made
