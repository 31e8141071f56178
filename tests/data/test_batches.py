from itertools import chain

import numpy as np
import pytest
import torch

from atoll.data.batches import Split, batch_table
from atoll.kernel.randomness import Keys

SIZES = [5, 1, 12, 7, 8]


def split_of(sizes, first=100):
    """Client k owns consecutive numbers, in descending order, so that `order` matters."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Split(torch.arange(first, first + offsets[-1]).flip(0), offsets)


def owned(split, client):
    return split.order[split.offsets[client] : split.offsets[client + 1]].tolist()


def table_of(split, clients, *, seed=0, round=0, stream="main", shuffle=True, batch_size=4, epochs=1, limit=None):
    who = np.array(clients)
    keys = Keys.of(torch.from_numpy(who), seed, "batches", round, stream) if shuffle else None
    return batch_table(split, who, keys, batch_size=batch_size, epochs=epochs, limit=limit)


def batches(table, position):
    """The real samples of each of a client's own steps."""
    steps = range(table.steps[position])
    valid = torch.ones_like(table.index, dtype=torch.bool) if table.valid is None else table.valid
    return [table.index[t, position][valid[t, position]].tolist() for t in steps]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_every_sample_comes_exactly_once_per_epoch(batch_size):
    split = split_of(SIZES)
    table = table_of(split, range(5), batch_size=batch_size, epochs=3)
    for client, size in enumerate(SIZES):
        seen, per_epoch = batches(table, client), -(-size // batch_size)
        assert len(seen) == 3 * per_epoch
        for epoch in range(3):
            one_epoch = list(chain(*seen[epoch * per_epoch : (epoch + 1) * per_epoch]))
            assert sorted(one_epoch) == sorted(owned(split, client))


def test_only_the_last_batch_of_an_epoch_is_short():
    lengths = [len(batch) for batch in batches(table_of(split_of(SIZES), range(5), epochs=2), 0)]
    assert lengths == [4, 1, 4, 1]


def test_epochs_are_shuffled_differently():
    seen = batches(table_of(split_of([40]), [0], epochs=2), 0)
    assert seen[:10] != seen[10:]


def test_order_does_not_depend_on_who_trains_beside():
    split = split_of(SIZES)
    together = table_of(split, range(5), epochs=2)
    backwards = table_of(split, [4, 3, 2, 1, 0], epochs=2)
    for client in range(5):
        alone = batches(table_of(split, [client], epochs=2), 0)
        assert batches(together, client) == alone == batches(backwards, 4 - client)


def test_order_depends_on_seed_round_and_stream():
    split = split_of([40])
    orders = [
        batches(table_of(split, [0], **changed), 0) for changed in ({}, {"seed": 1}, {"round": 1}, {"stream": "tune"})
    ]
    assert len({str(order) for order in orders}) == 4
    assert orders[0] == batches(table_of(split, [0]), 0)


def test_an_earlier_epoch_does_not_depend_on_how_many_follow():
    split = split_of(SIZES)
    assert batches(table_of(split, [2], epochs=5), 0)[:3] == batches(table_of(split, [2], epochs=1), 0)


def test_two_clients_of_one_size_see_different_orders():
    table = table_of(split_of([40, 40]), [0, 1])
    positions = [[place % 40 for place in chain(*batches(table, client))] for client in (0, 1)]
    assert positions[0] != positions[1]


def test_without_keys_samples_come_in_their_own_order():
    split = split_of(SIZES)
    table = table_of(split, range(5), shuffle=False, epochs=2)
    assert list(chain(*batches(table, 2))) == owned(split, 2) * 2


def test_a_limit_cuts_steps_but_changes_none():
    split = split_of(SIZES)
    whole, cut = table_of(split, range(5), epochs=4), table_of(split, range(5), epochs=4, limit=3)
    assert cut.steps.tolist() == [min(3, 4 * -(-size // 4)) for size in SIZES]
    for client in range(5):
        assert batches(cut, client) == batches(whole, client)[:3]


def test_no_epochs_and_no_samples_are_no_steps():
    assert table_of(split_of(SIZES), range(5), epochs=0).steps.tolist() == [0] * 5
    assert table_of(split_of([0, 0]), [0, 1]).index.shape[0] == 0
    mixed = table_of(split_of([0, 3]), [0, 1])
    assert mixed.steps.tolist() == [0, 1]
    assert sorted(batches(mixed, 1)[0]) == [100, 101, 102]


def test_padding_is_marked_only_where_there_is_some():
    assert table_of(split_of([4, 8]), [0, 1]).valid is None
    assert table_of(split_of([4, 7]), [0, 1]).valid.sum().item() == 4 + 7 + 4  # the first client's last step is unused


def test_all_indices_point_into_the_split():
    split = split_of(SIZES)
    table = table_of(split, range(5), epochs=2)
    assert set(table.index.flatten().tolist()) <= set(split.order.tolist())
