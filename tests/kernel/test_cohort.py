import pytest
import torch

from atoll.kernel.cohort import even_batch
from atoll.kernel.errors import CohortError
from atoll.kernel.params import Params, Stack, spread
from atoll.runtime.engines.plan import Plan

PLANS = [Plan("whole"), Plan("chunk", 2), Plan("loop"), Plan("loop", plain=True)]


def count(carry, batch, given):
    return Params.of(n=carry["n"] + batch.count)


def zero(task):
    return Params.of(n=torch.zeros((), dtype=task.x.dtype))


def test_a_cohort_knows_its_clients_and_their_samples(make_task, make_cohort):
    task = make_task()
    cohort = make_cohort(task, clients=[2, 1])
    assert len(cohort) == 2
    assert cohort.ids.tolist() == [2, 1]
    assert cohort.samples.tolist() == [12.0, 1.0]
    assert cohort.weights().tolist() == [12.0, 1.0]
    assert cohort.weights("uniform").tolist() == [1.0, 1.0]


def test_the_step_size_is_that_of_the_round(make_task, make_cohort):
    cohort = make_cohort(make_task(lr=0.5, lr_decay=0.5), round=2)
    assert cohort.lr.item() == 0.125


def test_scan_folds_over_all_samples_of_every_epoch(make_task, make_cohort):
    task = make_task(dtype=torch.float64)
    assert make_cohort(task).scan(count, zero(task), epochs=3)["n"].tolist() == [15.0, 3.0, 36.0, 21.0]


def test_no_epochs_return_the_carry(make_task, make_cohort):
    task = make_task()
    start = Stack.of(n=torch.arange(4.0))
    assert make_cohort(task).scan(count, start, epochs=0)["n"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_fewer_than_no_epochs_are_refused(make_task, make_cohort):
    with pytest.raises(CohortError, match="`epochs` must be at least 0. Got -1."):
        make_cohort(make_task()).scan(count, Params.of(n=0.0), epochs=-1)


def test_test_data_cannot_be_read_in_training(make_task, make_cohort):
    with pytest.raises(
        CohortError, match="Only train, val may be read here. Got split='test'.\nhint: test data are for"
    ):
        make_cohort(make_task()).scan(count, Params.of(n=0.0), split="test")


@pytest.mark.parametrize("carry", [torch.zeros(4), 0.0, {"a": 1}])
def test_a_bare_number_is_no_carry(make_task, make_cohort, carry):
    with pytest.raises(CohortError, match="must be Params or Stack. Got a bare (Tensor|float|int).\nhint: name it"):
        make_cohort(make_task()).scan(count, carry)


@pytest.mark.parametrize("clients", [3, 5])
def test_a_stack_of_another_cohort_is_refused_wherever_it_is_passed(make_task, make_cohort, clients):
    cohort, other = make_cohort(make_task()), Stack.of(n=torch.zeros(clients))
    for use in (
        lambda: cohort.scan(count, other),
        lambda: cohort.scan(count, Params.of(n=0.0), given={"other": other}),
        lambda: cohort.map(lambda p: p, other),
        lambda: cohort.recall(default=other),
    ):
        with pytest.raises(CohortError, match=f"A Stack must have one row per client, 4. Got {clients}."):
            use()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_map_gives_each_client_its_own_row(make_task, make_cohort, plan):
    cohort = make_cohort(make_task(), plan)
    own, shared = Stack.of(a=torch.arange(4.0)), Params.of(b=torch.tensor([10.0, 20.0]))
    found = cohort.map(
        lambda mine, all_: {"sum": Params.of(c=mine["a"] + all_["b"]), "bare": mine["a"] * 2}, own, shared
    )
    assert isinstance(found["sum"], Stack)
    assert found["sum"]["c"].tolist() == [[10.0 + k, 20.0 + k] for k in range(4)]
    assert found["bare"].tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_map_of_shared_values_only_repeats_them_for_every_client(make_task, make_cohort, plan):
    found = make_cohort(make_task(), plan).map(lambda w: w * 2.0, Params.of(a=3.0))
    assert found["a"].tolist() == [6.0] * 4


def test_map_gives_the_same_bits_alone_and_together_in_float64(make_task, make_cohort):
    task = make_task(dtype=torch.float64)
    many = Stack.of(a=torch.randn(4, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    whole = make_cohort(task, Plan("whole")).map(lambda p: p.norm(), many)
    alone = [
        make_cohort(task, Plan("loop"), [k]).map(lambda p: p.norm(), many.rows(slice(k, k + 1))).item()
        for k in range(4)
    ]
    assert whole.tolist() == alone


def test_a_captured_stack_is_refused_by_scan_and_map(make_task, make_cohort):
    cohort, mine = make_cohort(make_task()), Stack.of(a=torch.zeros(4))
    expected = (
        "must be given per-client values, not capture them. It captures the Stack `mine`.\nhint: pass it: cohort.scan"
    )
    with pytest.raises(CohortError, match=expected):
        cohort.scan(lambda carry, batch, given: carry + mine.client(0), Params.of(n=0.0))
    with pytest.raises(CohortError, match=expected):
        cohort.map(lambda w: w - mine, Params.of(a=0.0))


def test_a_stack_captured_by_a_helper_is_found_too(make_task, make_cohort):
    mine = Stack.of(n=torch.zeros(4))

    def helper(carry):
        return carry + mine.client(0)

    with pytest.raises(CohortError, match="It captures the Stack `mine`."):
        make_cohort(make_task()).scan(lambda carry, batch, given: helper(carry), Params.of(n=0.0))


def test_clients_recall_what_they_kept_and_others_the_default(make_task, make_cohort):
    cohort = make_cohort(make_task(), round=1)
    cohort._host._population.memory.keep(cohort.clients[1:3], Stack.of(v=torch.tensor([5.0, 6.0])), round=0)
    assert cohort.recall(default=Params.of(v=-1.0))["v"].tolist() == [-1.0, 5.0, 6.0, -1.0]


def test_stacking_spreads_every_params_of_a_tree(make_task, make_cohort):
    cohort = make_cohort(make_task())
    tree = cohort.stacked({"w": Params.of(a=1.0), "list": [Params.of(b=2.0), None], "own": spread(Params.of(c=3.0), 4)})
    assert tree["w"]["a"].tolist() == [1.0] * 4
    assert tree["list"][0].clients == tree["own"].clients == 4


def test_a_set_is_not_a_value(make_task, make_cohort):
    with pytest.raises(CohortError, match="must be made of numbers, tensors"):
        make_cohort(make_task()).stacked({"a": {1}})


@pytest.mark.parametrize("plan", [Plan(), Plan("loop"), Plan(mode="traced")])
def test_a_step_that_says_so_may_draw_and_every_client_step_and_round_draws_anew(make_task, make_cohort, plan):
    def step(carry, batch, given):
        noise = batch.normal("noise", 3)
        return Params.of(last=noise, total=carry["total"] + noise)

    start = Params.of(last=torch.zeros(3), total=torch.zeros(3))
    task = make_task(sizes=(8, 8), dtype=torch.float64)
    seen = make_cohort(task, plan).scan(step, start, draws=True)
    assert torch.equal(make_cohort(task).scan(step, start, draws=True)["total"], seen["total"])
    assert not torch.isclose(seen["last"][0], seen["last"][1]).any()  # of two clients
    assert not torch.isclose(seen["total"], 2 * seen["last"]).any()  # of two steps
    assert not torch.isclose(make_cohort(task, plan, round=1).scan(step, start, draws=True)["last"], seen["last"]).any()


def test_weights_by_samples_by_batches_and_alike(make_task, make_cohort):
    cohort = make_cohort(make_task())
    samples, size = cohort.samples, cohort.training.batch_size
    assert cohort.weights("samples").tolist() == samples.tolist()
    assert cohort.weights("batches").tolist() == [-(-int(one) // size) for one in samples]
    assert cohort.weights("batches").tolist() != samples.tolist()
    assert set(cohort.weights("uniform").tolist()) == {1.0}


@pytest.mark.parametrize(("samples", "size"), [(0, 1), (1, 1), (32, 32), (33, 17), (80, 27), (1000, 32)])
def test_batches_are_even_and_not_too_large(samples, size):
    assert even_batch(samples, 32) == size
