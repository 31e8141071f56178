import gc
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedper import FedPer
from atoll.kernel.errors import CohortError, RunError, UnknownName
from atoll.kernel.params import Params, Stack
from atoll.records.runs import KEPT_CHECKPOINTS
from atoll.runtime import memory as memories
from atoll.runtime.memory import DiskMemory, RamMemory, open_memory


@pytest.fixture(params=["ram", "disk"])
def memory(request, tmp_path):
    return open_memory(request.param, 1000, tmp_path)


def rows(*values):
    return Stack.of(v=torch.tensor(values))


def recalled(memory, clients, before=100, default=-1.0):
    found = memory.recall(np.array(clients), rows(*[default] * len(clients)), before=before)
    return found["v"].tolist()


def keep(memory, clients, *values, round=0):
    memory.keep(np.array(clients), rows(*values), round=round)


def test_nothing_kept_is_the_default(memory):
    assert recalled(memory, [3, 1]) == [-1.0, -1.0]


def test_clients_get_their_own_in_any_order_and_company(memory):
    keep(memory, [5, 2], 50.0, 20.0)
    keep(memory, [9], 90.0, round=1)
    assert recalled(memory, [9, 2, 4, 5]) == [90.0, 20.0, -1.0, 50.0]
    assert recalled(memory, [2]) == [20.0]


def test_it_says_who_has_kept_something(memory):
    assert memory.holds(np.array([2, 4]), before=9).tolist() == [False, False]
    keep(memory, [5, 2], 50.0, 20.0, round=3)
    assert memory.holds(np.array([2, 4, 5]), before=9).tolist() == [True, False, True]


def test_a_tree_without_leaves_is_kept_as_well(memory):
    """Such as the norm layers of a network that has none."""
    memory.keep(np.array([5, 2]), Stack({}), round=0)
    assert memory.holds(np.array([2, 4, 5]), before=9).tolist() == [True, False, True]
    assert dict(memory.recall(np.array([2, 4, 5]), Stack({}), before=9)) == {}


def test_the_newest_counts(memory):
    for round in range(5):
        keep(memory, [1, 2], float(round), 10.0 + round, round=round)
    assert recalled(memory, [2, 1]) == [14.0, 4.0]


def test_what_is_recalled_is_a_copy(memory):
    keep(memory, [1, 2], 1.0, 2.0)
    memory.recall(np.array([1, 2]), rows(0.0, 0.0), before=9)["v"].fill_(99.0)
    assert recalled(memory, [1, 2]) == [1.0, 2.0]


def test_what_was_kept_is_a_copy_and_the_default_is_not_written(memory):
    mine, default = rows(1.0), rows(-1.0, -1.0)
    memory.keep(np.array([0]), mine, round=0)
    mine["v"].fill_(99.0)
    memory.recall(np.array([0, 1]), default, before=9)
    assert recalled(memory, [0]) == [1.0]
    assert default["v"].tolist() == [-1.0, -1.0]


def test_memory_grows_with_the_clients_seen(memory):
    for first in range(0, 900, 90):  # doubling, with chunks that do not fit it
        keep(memory, range(first, first + 90), *map(float, range(first, first + 90)), round=0)
    assert recalled(memory, range(0, 1000, 7)) == [float(k) if k < 900 else -1.0 for k in range(0, 1000, 7)]


def test_ram_holds_no_more_than_twice_what_was_kept():
    memory = RamMemory(1_000_000)
    keep(memory, range(100), *map(float, range(100)))
    assert len(memory._blocks[0]) <= 200


def test_trees_of_any_form_are_kept(memory):
    tree = {"w": rows(1.0, 2.0), "list": [Stack.of(n=torch.tensor([3, 4])), None], "number": 7}
    memory.keep(np.array([0, 1]), tree, round=0)
    default = {"w": rows(0.0), "list": [Stack.of(n=torch.tensor([0])), None], "number": 7}
    found = memory.recall(np.array([1]), default, before=1)
    assert found["w"]["v"].tolist() == [2.0]
    assert found["list"][0]["n"].tolist() == [4]
    assert found["list"][0]["n"].dtype == torch.int64
    assert found["number"] == 7


def test_a_default_made_unlike_what_was_kept_is_refused(memory):
    keep(memory, [0], 1.0)
    with pytest.raises(CohortError, match="`recall` must be given a default made like what was kept."):
        memory.recall(np.array([0]), {"v": rows(0.0), "more": rows(0.0)}, before=1)


def test_a_saved_memory_comes_back(tmp_path):
    for kind in ("ram", "disk"):
        memory = open_memory(kind, 10, tmp_path)
        keep(memory, [4, 2], 4.0, 2.0)
        saved = memory.save(round=1)
        keep(memory, [4, 7], 44.0, 77.0, round=1)
        memory.load([saved], round=1)
        assert recalled(memory, [2, 4, 7], before=9) == [2.0, 4.0, -1.0]


def test_a_memory_that_never_kept_anything_is_saved_and_loaded(memory):
    assert memory.save(round=1) is None
    memory.load([], round=1)
    assert recalled(memory, [0]) == [-1.0]


def test_a_memory_beside_is_apart_but_saved_and_loaded_with_this_one(tmp_path):
    for kind in ("ram", "disk"):
        memory = open_memory(kind, 10, tmp_path)
        keep(memory.beside("gate"), [4], 4.0)
        saved = memory.save(round=1)  # what lies beside is saved although nothing else is there
        keep(memory, [4], 40.0, round=1)
        keep(memory.beside("gate"), [4, 5], 44.0, 55.0, round=1)
        assert [recalled(place, [4, 5]) for place in (memory, memory.beside("gate"), memory.beside("fsa"))] == [
            [40.0, -1.0], [44.0, 55.0], [-1.0, -1.0],
        ]  # fmt: skip
        memory.load([saved], round=1)
        assert recalled(memory, [4, 5]) == [-1.0, -1.0]
        assert recalled(memory.beside("gate"), [4, 5]) == [4.0, -1.0]


# -- changes -----------------------------------------------------------------------------------------------------------


def saved_changes(memory, round=1):
    """Return whose rows are saved, and whether these are all."""
    saved = memory.save(round=round, changes=True)
    return saved and (saved["clients"].tolist(), saved["whole"])


def test_only_changes_are_saved_until_most_of_them_are_superseded():
    memory = RamMemory(10)
    assert saved_changes(memory) is None
    keep(memory, [0, 1, 2, 3], 0.0, 1.0, 2.0, 3.0)
    assert saved_changes(memory) == ([0, 1, 2, 3], True)
    assert saved_changes(memory) is None
    for client in (3, 1, 1):  # 5, 6 and 7 rows for 4 clients
        keep(memory, [client], 9.0)
        assert saved_changes(memory) == ([client], False)
    keep(memory, [2], 9.0)  # 8 would be twice as many
    assert saved_changes(memory) == ([0, 1, 2, 3], True)
    keep(memory, [7], 7.0)
    assert saved_changes(memory) == ([7], False)


def test_changes_are_put_together_again_and_go_on_as_before():
    memory, again, saved = RamMemory(10), RamMemory(10), []
    keep(memory, [0, 1, 2, 3], 0.0, 1.0, 2.0, 3.0)
    saved.append(memory.save(round=1, changes=True))
    keep(memory, [3], 33.0)
    keep(memory.beside("gate"), [1], 11.0)
    saved.append(memory.save(round=2, changes=True))
    keep(memory, [3], 333.0)  # after it was saved, which is a copy
    again.load(saved, round=2)
    assert recalled(again, [0, 1, 2, 3, 4]) == [0.0, 1.0, 2.0, 33.0, -1.0]
    assert recalled(again.beside("gate"), [0, 1]) == [-1.0, 11.0]
    keep(again, [3], 333.0)
    for rest in ([2], [1], [0, 1]):  # with what lies beside, 5 clients' trees: the files may hold 9
        assert saved_changes(memory) == saved_changes(again)
        for one in (memory, again):
            keep(one, rest, *[5.0] * len(rest))
    assert saved_changes(memory) == saved_changes(again) == ([0, 1, 2, 3], True)


def test_all_that_was_saved_at_once_is_no_change_that_others_build_on():
    memory, again = RamMemory(10), RamMemory(10)
    keep(memory, [4, 2], 4.0, 2.0)
    again.load([memory.save(round=1)], round=1)
    keep(again, [4], 44.0)
    assert saved_changes(again) == ([2, 4], True)


def test_a_memory_on_disk_has_no_changes_to_save(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    keep(memory, [0], 1.0)
    assert memory.save(round=1, changes=True) is None


def test_pruning_does_not_take_a_pieces_rows_for_newer_ones(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    keep(memory, [0], 1.0, round=0)
    keep(memory.beside("gate"), [0], 2.0, round=1)
    memory.prune(round=4)
    assert recalled(memory, [0]) == [1.0]


# -- on disk -------------------------------------------------------------------------------------------------------


def test_an_earlier_round_does_not_see_later_rows(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    for round in range(4):
        keep(memory, [0], float(round), round=round)
    assert [recalled(memory, [0], before=round)[0] for round in range(5)] == [-1.0, 0.0, 1.0, 2.0, 3.0]
    memory.load([], round=2)  # back to after two rounds: 0 and 1
    assert recalled(memory, [0], before=100) == [1.0]


def test_rows_are_there_for_the_next_process(tmp_path):
    keep(DiskMemory(tmp_path / "m.sqlite"), [3], 3.0)
    assert recalled(DiskMemory(tmp_path / "m.sqlite"), [3]) == [3.0]


def stored(memory, piece=0):
    """The rows that are not free to be written over: whose they are, and of which round."""
    own = memory._rows._pieces[piece]
    older = [(client, round) for client, versions in own.older.items() for round, _ in versions]
    return sorted([*older, *((int(client), int(own.round[client])) for client in np.flatnonzero(own.slot >= 0))])


def size_of(path):
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT COUNT(*) FROM kept").fetchone()[0]
    connection.close()
    return found


def test_pruning_leaves_what_a_checkpoint_can_need(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    for round in range(6):
        keep(memory, [0], float(round), round=round)
    keep(memory, [1], 10.0, round=0)
    memory.prune(round=4)  # checkpoints after 4 and 5 rounds remain: they see rounds below 4 and below 5
    assert stored(memory) == [(0, 3), (0, 4), (0, 5), (1, 0)]
    assert [recalled(memory, [0], before=before)[0] for before in (4, 5, 6)] == [3.0, 4.0, 5.0]


def test_a_run_removes_rows_that_no_checkpoint_needs(make_task, tmp_path):
    task = make_task()
    report = federate(task, Ditto(), rounds=8, folder=tmp_path / "run", memory="disk", eval_every=1)
    # Checkpoints after 7 and 8 rounds remain; they need what was kept in rounds 6 and 7.
    assert KEPT_CHECKPOINTS == 2
    assert stored(report.population.memory) == [(client, round) for client in range(4) for round in (6, 7)]
    assert size_of(tmp_path / "run" / "memory.sqlite") <= 4 * (KEPT_CHECKPOINTS + 2)  # the others were written over


def test_a_resumed_memory_is_pruned_as_one_that_went_on(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    for round in range(4):
        keep(memory, [0, 1], float(round), 10.0 + round, round=round)
        keep(memory.beside("gate"), [round], 7.0, round=round)
    memory.save(round=4)
    again = DiskMemory(tmp_path / "m.sqlite")
    gate = again.beside("gate")
    again.load([], round=4)
    for one in (again, memory):
        one.prune(round=3)
        assert stored(one) == [(0, 2), (0, 3), (1, 2), (1, 3)]
        assert stored(one, gate._piece) == [(client, client) for client in range(4)]
    assert recalled(gate, [2, 0]) == [7.0, 7.0]


def test_free_rows_are_written_over_and_others_are_not(tmp_path):
    memory, draw = DiskMemory(tmp_path / "m.sqlite"), np.random.default_rng(0)
    kept = {}
    for round in range(40):
        clients = draw.choice(20, 6, replace=False)
        keep(memory, clients, *(100.0 * round + clients).tolist(), round=round)
        for client in clients.tolist():
            kept.setdefault(client, {})[round] = 100.0 * round + client
        if round % 3 == 2:
            memory.save(round=round + 1)
            memory.prune(round=round - 2)  # as after a checkpoint, with another before it
        if round % 10 == 9:  # resumed from the newest one or from that before it
            back = round + 1 - (round + 1) % 3 - (3 if round == 19 else 0)
            memory = DiskMemory(tmp_path / "m.sqlite")
            memory.load([], round=back)
            kept = {client: {r: v for r, v in one.items() if r < back} for client, one in kept.items()}
        for before in (round - 2, round, round + 1):
            newest = [max((r for r in kept.get(client, {}) if r < before), default=None) for client in range(20)]
            expected = [-1.0 if r is None else kept[client][r] for client, r in enumerate(newest)]
            assert recalled(memory, range(20), before=before) == expected
    assert size_of(tmp_path / "m.sqlite") <= 20 + 6 * 8  # of 240 that were kept


def test_who_keeps_twice_in_a_round_has_one_row(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    keep(memory, [4, 5], 1.0, 2.0, round=3)
    keep(memory, [5, 6], 20.0, 30.0, round=3)
    assert recalled(memory, [4, 5, 6]) == [1.0, 20.0, 30.0]
    assert stored(memory) == [(4, 3), (5, 3), (6, 3)]
    assert size_of(tmp_path / "m.sqlite") == 3


def test_holders_are_counted_as_of_a_round(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    keep(memory, [0, 1], 0.0, 1.0, round=0)
    keep(memory, [1, 2], 1.0, 2.0, round=1)
    keep(memory.beside("gate"), [1], 1.0, round=1)
    assert [memory.holders(before=before) for before in (0, 1, 2)] == [0, 2, 4]
    memory.load(None, round=1)
    assert memory.holders(before=9) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_values_of_all_types_and_shapes_come_back_in_their_bits(memory, dtype):
    values = {"a": torch.arange(6).reshape(2, 3).to(dtype), "none": torch.zeros(2, 0), "b": torch.tensor([0.1, -0.0])}
    memory.keep(np.array([4, 7]), Stack.of(**values), round=0)
    like = {name: torch.zeros_like(leaf)[:1] for name, leaf in values.items()}
    found = memory.recall(np.array([7]), Stack.of(**like), before=1)
    for name, leaf in values.items():
        assert found[name].dtype == leaf.dtype
        assert torch.equal(found[name], leaf[1:])


@pytest.mark.parametrize("clients", [1, 3])
def test_what_all_clients_have_in_common_is_kept_for_each(memory, clients):
    shared = {"w": torch.arange(4.0).reshape(2, 2).expand(clients, 2, 2), "n": torch.tensor(7).expand(clients)}
    memory.keep(np.arange(clients), Stack.of(**shared), round=0)
    found = memory.recall(
        np.array([0]), Stack.of(w=torch.zeros(1, 2, 2), n=torch.zeros(1, dtype=torch.int64)), before=1
    )
    assert found["w"].tolist() == [[[0.0, 1.0], [2.0, 3.0]]]
    assert found["n"].tolist() == [7]


def test_the_memory_that_fits_is_chosen(make_task, tmp_path, monkeypatch):
    task = make_task()
    size = sum(leaf.nbytes for leaf in task.network.initial.values())
    chosen = []
    for name, of_all in ("ram", 8 * 4 * size), ("disk", 8 * 4 * size - 1):
        monkeypatch.setattr(memories, "_memory_of", lambda device, of_all=of_all: of_all)
        report = federate(task, Ditto(), rounds=2, folder=tmp_path / name)
        chosen.append(report.config.settings.memory)
    assert chosen == ["ram", "disk"]
    assert federate(task, Ditto(), rounds=1).config.settings.memory == "ram"  # there is no folder


def test_a_run_goes_on_with_the_memory_it_began_with(make_task, tmp_path, monkeypatch):
    def stop(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(memories, "_memory_of", lambda device: 0)
    with pytest.raises(KeyboardInterrupt):
        federate(make_task(), Ditto(), rounds=2, eval_every=1, folder=tmp_path / "run", on_round=stop)
    monkeypatch.undo()
    again = federate(make_task(), Ditto(), rounds=2, eval_every=1, folder=tmp_path / "run", resume=True)
    assert again.config.settings.memory == "disk"


def test_the_file_is_closed_when_nobody_holds_the_memory(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    keep(memory, [0], 1.0)
    connection = memory._connection
    del memory
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    assert not (tmp_path / "m.sqlite-wal").exists()


def test_a_full_disk_says_what_to_do(tmp_path):
    memory = DiskMemory(tmp_path / "m.sqlite")
    memory._connection.execute("PRAGMA max_page_count = 4")  # a disk of 16 KiB
    with pytest.raises(
        RunError, match=r"must be written to .*m.sqlite. It cannot be: database or disk is full.\nhint: make room"
    ):
        memory.keep(np.arange(10), Stack.of(v=torch.zeros(10, 1000)), round=0)
    assert recalled(memory, [0]) == [-1.0]  # all rows of a cohort or none


def test_unknown_memories_and_missing_folders_are_refused(make_task, tmp_path):
    with pytest.raises(UnknownName, match="Unknown memory 'dsk'. Did you mean: disk?"):
        federate(make_task(), Ditto(), memory="dsk", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UnknownName, match="A memory on disk must have a folder."):
        open_memory("disk", 3, None)


# -- in a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [Ditto(lam=0.5), FedPer()], ids=["ditto", "fedper"])
def test_ram_and_disk_give_the_same_run(make_task, tmp_path, algorithm):
    task = make_task(sizes=(12, 8, 5, 9, 3, 7), shares=(0.6, 0.2, 0.2))

    def run(kind: str, folder: Path | None):
        report = federate(task, algorithm, rounds=5, cohort=3, memory=kind, folder=folder, eval_every=1)
        lines = [
            {name: value for name, value in line.items() if name not in ("seconds", "memory")}
            for line in report.history
        ]
        own = report.population.memory
        default = task.network.initial.part("head") if isinstance(algorithm, FedPer) else task.network.initial
        kept = own.recall(
            np.arange(6), Stack({n: v.expand(6, *v.shape) for n, v in default.items()}, default.layout), before=5
        )
        return lines, report.server, kept

    lines, server, kept = run("ram", None)
    lines_2, server_2, kept_2 = run("disk", tmp_path / "run")
    np.testing.assert_equal(lines_2, lines)
    assert all(torch.equal(server[name], server_2[name]) for name in server)
    assert all(torch.equal(kept[name], kept_2[name]) for name in kept)
    assert isinstance(server, Params)
