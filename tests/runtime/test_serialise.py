import json

import pytest
import safetensors.torch
import torch

from atoll.kernel.errors import PayloadError
from atoll.kernel.params import Layout, Params, Stack, flatten, stack
from atoll.runtime.serialise import from_bytes, size_of, to_bytes

LAYOUT = Layout({"w": "trained", "seen": "buffer"})


def model(value=1.0):
    return Params({"w": torch.full((2, 3), value), "seen": torch.tensor(4)}, LAYOUT)


TREE = {
    "model": model(),
    "list": [torch.tensor([1.5]), None, 3, "text"],
    "pair": (Stack.of(a=torch.ones(2, 1)), 0.1),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]),
}


def test_a_tree_survives_the_wire_bit_for_bit():
    again = from_bytes(to_bytes(TREE), LAYOUT)
    leaves, structure = flatten(TREE)
    leaves_again, structure_again = flatten(again)
    assert structure_again == structure
    for old, new in zip(leaves, leaves_again, strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)
    assert again["model"].layout is LAYOUT


def test_views_and_spread_values_are_written_whole():
    wide = torch.arange(6.0).reshape(2, 3)
    again = from_bytes(to_bytes([wide.T, wide[0].expand(4, 3), wide[:, 1]]))
    assert torch.equal(again[0], wide.T)
    assert torch.equal(again[1], wide[0].expand(4, 3))
    assert again[2].tolist() == [1.0, 4.0]


def test_a_state_may_hold_the_same_model_twice():
    w = model()
    again = from_bytes(to_bytes({"now": w, "before": w}), LAYOUT)
    assert torch.equal(again["now"]["w"], again["before"]["w"])


def test_size_is_the_length_of_one_clients_message():
    assert size_of(TREE["model"]) == len(to_bytes(TREE["model"]))
    many = stack([model(1.0), model(2.0), model(3.0)])
    assert size_of(many, each=True) == len(to_bytes(model()))
    assert size_of({"a": many, "b": 3}, each=True) == len(to_bytes({"a": model(), "b": 3}))


def test_size_follows_the_type():
    wide, narrow = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float32)
    assert size_of(wide) - size_of(narrow) == 4000


def test_nothing_is_unpickled(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pickle.pt")
    with pytest.raises(PayloadError, match="A message must be safetensors with a structure. It is not:"):
        from_bytes((tmp_path / "pickle.pt").read_bytes())


@pytest.mark.parametrize(
    "structure",
    [
        "[]", "{}", "1", "null", "{", '{"kind":"exec"}', '{"kind":"static","value":1}',
        '{"kind":"params","names":["a","b"]}', '{"kind":"params","names":3}',
        '{"kind":"dict","names":["a"],"parts":[]}', '{"kind":"list","parts":[1]}',
    ],
)  # fmt: skip
def test_a_message_with_a_wrong_structure_is_refused(structure):
    message = safetensors.torch.save({"0": torch.ones(1)}, {"structure": structure})
    with pytest.raises(PayloadError, match="must be safetensors with a structure"):
        from_bytes(message)


def test_every_truncation_is_refused():
    message = to_bytes(TREE)
    for length in range(len(message)):
        with pytest.raises(PayloadError):
            from_bytes(message[:length])


def test_a_message_is_readable_without_atoll():
    message = to_bytes(model())
    length = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + length])
    assert json.loads(header["__metadata__"]["structure"]) == {"kind": "params", "names": ["w", "seen"], "model": True}
    assert safetensors.torch.load(message)["1"].item() == 4


def test_a_state_may_hold_a_row_of_a_stack_beside_it():
    models = Stack.of(w=torch.arange(6.0).reshape(3, 2))
    state = {"row": models.client(1), "models": models, "again": models.client(2)}
    found = from_bytes(to_bytes(state))
    assert torch.equal(found["row"]["w"], torch.tensor([2.0, 3.0]))
    assert torch.equal(found["models"]["w"], models["w"])
    assert torch.equal(found["again"]["w"], torch.tensor([4.0, 5.0]))
