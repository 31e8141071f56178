import pytest
import torch

from atoll.kernel.errors import CohortError
from atoll.kernel.params import Layout, Params, Stack, flatten, named_leaves, spread, stack, stacked_leaves, unflatten

LAYOUT = Layout({"w": "trained", "frozen": "frozen", "mean": "buffer", "seen": "buffer"}, head=frozenset({"w"}))


def model(w=(3.0, 4.0), frozen=2.0, mean=1.0, seen=5):
    leaves = {
        "w": torch.tensor(w),
        "frozen": torch.tensor(frozen),
        "mean": torch.tensor(mean),
        "seen": torch.tensor(seen),
    }
    return Params(leaves, LAYOUT)


def values(tree):
    return {name: leaf.tolist() for name, leaf in tree.items()}


def test_a_sum_adds_leaf_by_leaf_integers_too():
    total = model() + model(w=(1.0, 1.0), seen=2)
    assert values(total) == {"w": [4.0, 5.0], "frozen": 4.0, "mean": 2.0, "seen": 7}
    assert total.layout is LAYOUT


def test_leaves_that_the_right_operand_does_not_name_stay():
    step = Params.of(w=torch.tensor([1.0, -1.0]))
    assert values(model() + step) == {"w": [4.0, 3.0], "frozen": 2.0, "mean": 1.0, "seen": 5}
    assert values(model() - step)["w"] == [2.0, 5.0]


def test_a_leaf_that_only_the_right_operand_has_is_refused():
    with pytest.raises(CohortError, match=r"must have every leaf of the right one. Got none called 'v' in Params\(w:"):
        model() + Params.of(v=1.0)


def test_integer_buffers_ride_along_when_scaled():
    assert values(0.5 * model()) == {"w": [1.5, 2.0], "frozen": 1.0, "mean": 0.5, "seen": 5}
    assert values(model() / 2) == values(model() * 0.5)
    assert values(-model())["w"] == [-3.0, -4.0]


def test_flags_have_no_sum_and_stay_as_they_are():
    flags = Params.of(mask=torch.tensor([True, False]))
    assert values(flags - flags) == values(flags + flags) == {"mask": [True, False]}


def test_operands_are_not_changed():
    w, step = model(), model(w=(1.0, 1.0))
    before = values(w), values(step)
    w + step, w - step, w * 2.0, w.moved(step.trained, -0.1), w.lerp(step, 0.5), w | step
    assert (values(w), values(step)) == before


def test_params_and_numbers_do_not_add():
    with pytest.raises(TypeError):
        model() + 1.0


def test_norms_and_products_run_over_trained_leaves_only():
    assert model().norm().item() == 5.0  # sqrt(3^2 + 4^2); the rest would make it larger
    assert model().dot(model(w=(1.0, 2.0))).item() == 3 * 1 + 4 * 2
    assert Params.of(a=3.0, b=4.0).norm().item() == 5.0  # without a layout everything is trained


def test_a_stack_has_one_norm_per_client():
    both = stack([model(), model(w=(6.0, 8.0))])
    assert both.norm().tolist() == [5.0, 10.0]
    assert both.dot(model(w=(1.0, 0.0))).tolist() == [3.0, 6.0]


def test_a_scalar_leaf_per_client_has_a_norm():
    assert Stack.of(a=torch.tensor([3.0, -6.0]), b=torch.tensor([4.0, 8.0])).norm().tolist() == [5.0, 10.0]


def test_a_stack_minus_params_subtracts_from_every_client():
    delta = stack([model(), model(w=(6.0, 8.0), seen=7)]) - model()
    assert isinstance(delta, Stack)
    assert values(delta) == {"w": [[0.0, 0.0], [3.0, 4.0]], "frozen": [0.0, 0.0], "mean": [0.0, 0.0], "seen": [0, 2]}


def test_params_plus_a_partial_stack_is_a_stack_of_all_leaves():
    moved = model() + Stack.of(w=torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert values(moved) == {"w": [[4.0, 5.0], [5.0, 6.0]], "frozen": [2.0, 2.0], "mean": [1.0, 1.0], "seen": [5, 5]}


def test_a_scale_per_client_lies_along_the_client_axis():
    scaled = spread(model(), 2) * torch.tensor([1.0, 10.0])
    assert values(scaled) == {
        "w": [[3.0, 4.0], [30.0, 40.0]],
        "frozen": [2.0, 20.0],
        "mean": [1.0, 10.0],
        "seen": [5, 5],
    }


def test_a_step_may_have_a_size_per_client():
    start = Stack.of(w=torch.zeros(2, 3))
    moved = start.moved(Stack.of(w=torch.ones(2, 3)), torch.tensor([1.0, -2.0]))
    assert values(moved) == {"w": [[1.0] * 3, [-2.0] * 3]}


@pytest.mark.parametrize("size", [-0.5, torch.tensor(-0.5)])
def test_a_step_moves_the_named_leaves(size):
    moved = model().moved(Params.of(w=torch.tensor([2.0, 4.0])), size)
    assert values(moved) == {"w": [2.0, 2.0], "frozen": 2.0, "mean": 1.0, "seen": 5}


def test_a_step_has_a_size_for_what_is_trained_and_takes_the_rest_as_it_is():
    delta = model(w=(1.0, 2.0), frozen=0.0, mean=0.5, seen=2)
    assert values(model().step(delta, 3.0)) == {"w": [6.0, 10.0], "frozen": 2.0, "mean": 1.5, "seen": 7}
    assert values(model().step(delta.only(["w"]), 3.0)) == {"w": [6.0, 10.0], "frozen": 2.0, "mean": 1.0, "seen": 5}


def test_lerp_mixes_floating_point_leaves_and_leaves_counters_alone():
    mixed = model().lerp(model(w=(7.0, 8.0), mean=3.0, seen=9), 0.25)
    assert values(mixed) == {"w": [0.75 * 3 + 0.25 * 7, 0.75 * 4 + 0.25 * 8], "frozen": 2.0, "mean": 1.5, "seen": 5}


def test_lerp_leaves_alone_what_the_other_does_not_name():
    assert values(model().lerp(Params.of(mean=3.0), 0.5)) == {"w": [3.0, 4.0], "frozen": 2.0, "mean": 2.0, "seen": 5}


def test_lerp_may_have_a_share_per_client():
    own, shared = Stack.of(w=torch.zeros(2, 2)), Params.of(w=torch.tensor([4.0, 8.0]))
    assert values(own.lerp(shared, torch.tensor([0.0, 0.5]))) == {"w": [[0.0, 0.0], [2.0, 4.0]]}


def test_each_client_may_choose_between_two():
    mine, other = stack([model(), model()]), model(w=(0.0, 0.0), seen=9)
    for theirs in (other, stack([other, other])):
        chosen = mine.where(torch.tensor([True, False]), theirs)
        assert values(chosen) == {"w": [[3, 4], [0, 0]], "frozen": [2, 2], "mean": [1, 1], "seen": [5, 9]}
        assert chosen.layout is LAYOUT


def test_union_takes_the_right_leaf_and_stacks_both():
    joined = Stack.of(head=torch.tensor([[1.0], [2.0]])) | Params.of(body=torch.tensor([5.0]), head=torch.tensor([9.0]))
    assert isinstance(joined, Stack)
    assert values(joined) == {"head": [[9.0], [9.0]], "body": [[5.0], [5.0]]}


def test_parts_are_what_the_layout_says():
    w = model()
    assert set(w.trained) == {"w"} == set(w.part("head"))
    assert set(w.buffers) == {"mean", "seen"}
    assert set(w.part("body")) == {"frozen", "mean", "seen"} == set(w.without_part("head"))
    assert set(w.part("all")) == set(w)
    assert not w.part("none")
    assert set(w.zeros()) == {"w"}


def test_rows_and_clients_of_a_stack():
    three = stack([model(w=(float(k), 0.0)) for k in range(3)])
    assert three.clients == 3
    assert values(three.rows(torch.tensor([2, 0])))["w"] == [[2.0, 0.0], [0.0, 0.0]]
    assert isinstance(three.client(1), Params)
    assert values(three.client(1))["w"] == [1.0, 0.0]


def test_spreading_copies_nothing():
    w = model()
    assert spread(w, 1000)["w"].data_ptr() == w["w"].data_ptr()


def test_a_tree_survives_flattening():
    tree = {
        "w": model(),
        "k": [Stack.of(a=torch.arange(2.0)), (1, 2.5, "x", None, True)],
        "t": torch.tensor(3.0),
    }
    leaves, structure = flatten(tree)
    again = unflatten(structure, leaves)
    assert again["w"].layout is LAYOUT
    assert values(again["w"]) == values(tree["w"])
    assert isinstance(again["k"][0], Stack)
    assert again["k"][1] == (1, 2.5, "x", None, True)
    assert again["t"].item() == 3.0
    assert stacked_leaves(structure) == [False] * 4 + [True, False]
    assert flatten(again)[1] == structure
    assert hash(flatten(again)[1]) == hash(structure)


def test_the_tensors_of_a_tree_have_the_names_of_their_leaves():
    tree = {"w": Params.of(a=1.0, b=2.0), "rest": [torch.tensor(3.0), Stack.of(c=torch.tensor([4.0]))], "n": 5}
    assert [(name, leaf.tolist()) for name, leaf in named_leaves(tree)] == [
        ("a", 1.0), ("b", 2.0), ("", 3.0), ("c", [4.0]),
    ]  # fmt: skip


def test_structures_differ_by_numbers_names_and_nesting():
    one = flatten({"lam": 0.1, "w": model()})[1]
    assert one != flatten({"lam": 0.2, "w": model()})[1]
    assert one != flatten({"lam": 0.1, "v": model()})[1]
    assert one != flatten({"lam": 0.1, "w": spread(model(), 2)})[1]


def test_one_client_sees_its_row_of_a_stack_as_params():
    leaves, structure = flatten(Stack.of(a=torch.arange(2.0)))
    assert isinstance(unflatten(structure, [leaf[0] for leaf in leaves], one_client=True), Params)


def test_what_a_tree_cannot_hold_is_refused_with_what_it_can():
    with pytest.raises(
        CohortError, match="must be made of numbers, tensors, Params, Stack.* Got set.\nhint: put tensors"
    ):
        flatten({"a": {1, 2}})
