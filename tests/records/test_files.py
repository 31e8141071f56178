import json
import logging
import os
from typing import Any

import pytest

from atoll.kernel.errors import RunError
from atoll.protect.ledger import Entry
from atoll.records.files import read_lines, read_record, write_record
from atoll.records.schema import SCHEMA
from atoll.runtime.files import read_regular

ENTRY = {"direction": "up", "round": 0, "field": "w", "kind": "model", "bytes": 4, "clients": [0, 1]}


# -- files of other kinds ----------------------------------------------------------------------------------------------


def test_only_regular_files_of_a_sensible_size_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_regular(path) == b"1234"
    with pytest.raises(RunError, match="must have at most 3 bytes. It has 4."):
        read_regular(path, largest=3)
    for name, make, said in [
        ("gone", lambda place: None, "must be readable: No such file"),
        ("folder", lambda place: place.mkdir(), "is a folder"),
        ("pipe", os.mkfifo, "is a pipe"),  # which would be waited for
        ("link", lambda place: place.symlink_to(path), "must not be a link"),
        ("circle", lambda place: place.symlink_to(place), "must not be a link"),
    ]:
        make(tmp_path / name)
        with pytest.raises(RunError, match=said):
            read_regular(tmp_path / name)


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "config.json"
    write_record(path, {"a": 1, "b": [1.5, float("nan")]})
    return path


def test_a_file_holds_its_version_and_a_seal(sealed):
    assert read_record(sealed, dict[str, Any])["a"] == 1
    content = json.loads(sealed.read_text())
    sealed.write_text(json.dumps(content))  # laid out differently, the same content
    assert read_record(sealed, dict[str, Any])["a"] == 1


@pytest.mark.parametrize(
    "change", [{"a": 2}, {"c": 0}, {"seal": None}, {"seal": "0" * 64}, {"schema": None}, {"schema": 0}]
)
def test_a_file_that_was_changed_is_named(sealed, change):
    sealed.write_text(json.dumps({**json.loads(sealed.read_text()), **change}))
    with pytest.raises(RunError, match=r"config.json was changed after it was written.\nhint: put the file back"):
        read_record(sealed, dict[str, Any])


def test_a_file_of_a_newer_version_is_refused_with_what_to_do(sealed):
    sealed.write_text(json.dumps({**json.loads(sealed.read_text()), "schema": SCHEMA + 1}))
    with pytest.raises(RunError, match=r"at most schema 4. It is of schema 5.\nhint: it was written by a newer Atoll"):
        read_record(sealed, dict[str, Any])


def test_an_older_file_has_neither(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_record(tmp_path / "config.json", dict[str, int]) == {"a": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read: Expecting value"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "must not be nested so deeply"),
        (b"9" * 5000, "cannot be read: Exceeds the limit"),
        (b"[1]", "it must be a dictionary"),
        (b'{"a": "x"}', "must be what a run writes: a must be a whole number. It is 'x'."),
    ],
)
def test_what_is_no_record_is_refused_by_file_and_reason(tmp_path, data, said):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(RunError) as error:
        read_record(tmp_path / "config.json", dict[str, int])
    assert f"{tmp_path / 'config.json'} must" in str(error.value)
    assert said in str(error.value)


# -- lines -------------------------------------------------------------------------------------------------------------


def write_lines(path, *lines):
    path.write_text("".join(lines))


@pytest.mark.parametrize("bad", ["no line\n", "[1]\n", json.dumps({**ENTRY, "bytes": "4"}) + "\n", "\0\0\0\n"])
def test_after_the_last_checkpoint_lines_that_cannot_be_read_are_left_out_aloud(tmp_path, bad, caplog):
    path, good = tmp_path / "ledger.jsonl", json.dumps(ENTRY) + "\n"
    write_lines(path, good, bad, good)
    with caplog.at_level(logging.WARNING, "atoll.run"):
        assert len(read_lines(path, Entry, sealed=1)) == 1
    assert "line 2 and what follows are left out" in caplog.text
    with pytest.raises(RunError, match="ledger.jsonl must be what a run writes"):  # a checkpoint vouches for it
        read_lines(path, Entry, sealed=2)


def test_a_last_line_that_was_cut_short_is_left_out_quietly(tmp_path, caplog):
    write_lines(tmp_path / "ledger.jsonl", json.dumps(ENTRY) + "\n", json.dumps(ENTRY)[:20])
    assert read_lines(tmp_path / "ledger.jsonl", Entry) == [Entry("up", 0, "w", "model", 4, (0, 1))]
    assert not caplog.records
    assert read_lines(tmp_path / "none.jsonl", Entry) == []
