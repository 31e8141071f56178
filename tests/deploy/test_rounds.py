"""The offline story: five hospitals in five directories, one coordinator without data, and files that are carried."""

import errno
import json
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from deploy.story import NAMES, Story, forge, is_in, write_hospital
from typer.testing import CliRunner

from atoll import LocalEngine, federate
from atoll.cli import app
from atoll.compose import create
from atoll.data.schema import Schema
from atoll.data.task import Task
from atoll.deploy import files, messages, store
from atoll.deploy.coordinator import seat_sites
from atoll.deploy.demands import list_demands
from atoll.deploy.keys import Key
from atoll.deploy.schemas import read_public, task_without_data
from atoll.deploy.showing import describe
from atoll.kernel.errors import DeployError, RefusedError
from atoll.kernel.params import flatten
from atoll.runtime import serialise


def atoll(folder: Path, *words: str, fails: bool = False) -> str:
    """Run a command in a folder, with the only key that is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ATOLL_KEYS", str(folder / "keys"))
        result = CliRunner().invoke(app, list(words))
    assert bool(result.exit_code) == fails, result.output
    return result.output


def carry(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, to)


@pytest.mark.parametrize(("method", "rounds"), [("fafi:epochs=1", 1), ("ditto", 3)])
def test_five_directories_that_share_nothing(tmp_path, method, rounds) -> None:
    center, homes = tmp_path / "center", [tmp_path / name for name in NAMES]
    for number, home in enumerate(homes):
        write_hospital(home / "my.csv", number, samples=30)
        atoll(home, "keys", home.name)
        carry(home / "keys" / f"{home.name}.pub", center / "sites" / f"{home.name}.pub")
    atoll(center, "keys", "center")
    atoll(homes[0], "data", "schema", "my.csv", "--target", "readmitted")
    carry(homes[0] / "schema.json", center / "schema.json")
    asked = ["--sites", "sites", "--model", "mlp:4", "--rounds", str(rounds)]
    atoll(center, "round", "start", method, "--own-schema", "schema.json", *asked, "-o", "job.atoll")
    newest = center / "job.atoll"
    for done in range(rounds):
        for home in homes:
            carry(newest, home / "job.atoll")
            atoll(home, "round", "train", "job.atoll", "--data", "my.csv", "-o", "reply.atoll")
            carry(home / "reply.atoll", center / f"replies-{done}" / f"{home.name}.atoll")
        newest = center / f"next-{done}.atoll"
        atoll(center, "round", "finish", f"replies-{done}", "-o", newest.name)
    found = {}
    for home in homes:
        carry(newest, home / "result.atoll")
        shown = atoll(home, "round", "apply", "result.atoll", "-o", "scores.atoll")
        found[home.name] = float(next(line for line in shown.splitlines() if "personal" in line).split()[-1])
        carry(home / "scores.atoll", center / "scores" / f"{home.name}.atoll")
        assert f"after round {rounds}" in atoll(home, "round", "show", "scores.atoll").replace("\n", " ")
        manifest = json.loads((home / "models" / home.name / "manifest.json").read_text())
        assert manifest["output"]["classes"] == ["no", "yes"]
        assert manifest["measured"]["difference"] < 1e-5
        (line,) = (line for line in shown.splitlines() if "personal" in line)
        assert manifest["score"]["value"] == pytest.approx(float(line.split()[-2]), abs=6e-4)
    shown = atoll(center, "round", "finish", "scores")
    assert "report" in shown
    assert (center / "federation" / "report.html").stat().st_size > 10_000
    assert not [*center.rglob("my.csv")]
    line = json.loads((center / "federation" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["replied"] == 5
    scores = line["evaluation"]["personal"]["test"]["clients"]
    np.testing.assert_allclose([found[name] for name in sorted(found)], scores, atol=6e-4)
    for home in homes:  # no sample left
        task = Task.of_site(str(home / "my.csv"), Schema.load(center / "schema.json"), model="mlp:4")
        assert not any(is_in(home / "reply.atoll", sample) for sample in task.x.numpy())


def test_a_reply_is_shown_byte_for_byte(tmp_path) -> None:
    story = Story(tmp_path, "ditto")
    path = story.reply("Ulm")
    for one in (path, story.waiting.written["Ulm"]):
        assert describe(messages.read_file(one)).bytes == one.stat().st_size
    shown = atoll(tmp_path, "round", "show", str(path))
    assert "train 24, val 6, test 10" in shown
    assert "no sample, nothing that clients keep" in shown
    assert ", round 1, written" in shown.replace("\n", " ")
    assert f"{path.stat().st_size:,}" in shown


@pytest.mark.parametrize("method", ["ditto", "fafi:epochs=1"])
def test_files_give_what_a_simulation_of_the_same_files_gives(tmp_path, method) -> None:
    names = sorted(NAMES[:3])  # as in a folder
    story = Story(tmp_path, method, names=names, rounds=1 if "fafi" in method else 2)
    report, folder = story.play(), tmp_path / "all"
    for name in names:
        carry(tmp_path / name / "my.csv", folder / f"{name}.csv")
    task = Task.own(str(folder), target="readmitted", model="mlp:4")
    engine = LocalEngine(device="cpu", strategy="loop eager")
    simulated = federate(task, create(method), rounds=story.terms.rounds, engine=engine)
    np.testing.assert_array_equal(report.samples(), simulated.samples())
    np.testing.assert_allclose(report.scores(), simulated.scores(), atol=1e-6)
    for mine, other in zip(flatten(report.server)[0], flatten(simulated.server)[0], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_the_report_is_that_of_any_run(tmp_path) -> None:
    report = Story(tmp_path, "ditto").play()
    assert report.finished
    assert report.history[0]["replied"] == 3
    assert report.ledger.bytes("up") > 0
    assert np.isfinite(report.scores()).all()


# -- what a site refuses -----------------------------------------------------------------------------------------------


def refusal(story, name="Ulm", data=None, **more):
    """Return the reason for which a site refuses a job."""
    job = story.waiting.written[name].read_bytes() if data is None else data
    with pytest.raises(RefusedError) as caught:
        story.site(name, **more).answer(job)
    return str(caught.value)


def test_a_site_refuses_what_it_has_not_agreed_to(tmp_path) -> None:
    story = Story(tmp_path)
    job, mallory = story.waiting.written["Ulm"].read_bytes(), Key.make("center")
    assert "altered" in refusal(story, data=job[:-1] + bytes([job[-1] ^ 1]))
    assert "altered, or it was not signed" in refusal(story, data=forge(job, round=1))
    assert "it must be whole" in refusal(story, data=job[:-1])
    assert "does not begin like one" in refusal(story, data=b"PK\x03\x04" + job[4:])
    assert "the form 1 of messages. It has 9" in refusal(story, data=job[:6] + b"\x09" + job[7:])
    assert "takes jobs only" in refusal(story, data=story.reply("Porto").read_bytes())
    ahead = forge(job, story.key, written="2099-01-01T00:00:00+00:00")
    assert "hint: one of the clocks is off" in refusal(story, data=ahead)
    other = forge(job, story.key, versions={"atoll": "9.3.0", "code": "?"})
    assert "center has Atoll 9.3.0, this is Atoll" in refusal(story, data=other)
    assert "that matters" in refusal(story, data=other)
    known = story.key.public.value.hex()
    assert "not signed by the coordinator" in refusal(story, data=forge(job, mallory), coordinator=known)
    story.reply("Ulm")
    assert "not signed by the coordinator" in refusal(story, data=forge(job, mallory, number=1))
    changed = json.loads(json.dumps(story.terms.as_json())) | {"seed": 7}
    assert "its terms differ" in refusal(story, data=forge(job, story.key, number=1, about={"terms": changed}))


def test_a_site_refuses_methods_that_are_not_installed(tmp_path) -> None:
    story = Story(tmp_path)
    job = story.waiting.written["Ulm"].read_bytes()
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    for method in (
        {"name": str(tmp_path / "evil.py"), "file": None, "values": {}},
        {"name": "evil", "file": "0" * 64, "values": {}},
        {"name": "evil", "file": str(tmp_path / "evil.py"), "values": {}},
        {"name": "fedavg", "file": None, "values": {"epochs": -1}},
        {"name": "no-such-method", "file": None, "values": {}},
        {"name": "fedavg"},
        [],
    ):
        reason = refusal(story, data=forge(job, story.key, about={"method": method}))
        assert "center" in reason
        assert "executed" not in reason


def test_a_site_names_the_column_that_does_not_fit(tmp_path) -> None:
    story = Story(tmp_path)
    path = tmp_path / "Ulm" / "my.csv"
    text = path.read_text()
    path.write_text(text.replace("pressure", "druck"))
    assert "pressure" in refusal(story)
    path.write_text(text.replace(",F,", ",X,"))
    assert "`sex` must hold one of F, M" in refusal(story)
    path.write_text(text.replace("yes", "perhaps"))
    assert "readmitted" in refusal(story)


def test_a_site_without_validation_data_is_refused_where_it_matters(tmp_path) -> None:
    story = Story(tmp_path, "fedfomo")
    (tmp_path / "Ulm" / "my.csv").write_text("age,sex,pressure,readmitted\n50,F,120,yes\n60,M,110,no\n")
    assert "chooses on validation data, and a client of this site has none" in refusal(story)
    story.reply("Porto")


def test_a_site_has_one_place(tmp_path) -> None:
    story = Story(tmp_path)
    assert "the place of Porto belongs to another key" in refusal(story, site="Porto")
    assert "has no place for Bonn. It has: Ulm, Porto, Lund" in refusal(story, site="Bonn")
    story.keys["Ulm"] = Key.make("Bonn")
    assert "has no place for Bonn" in refusal(story)


def test_the_same_job_gets_the_same_reply_and_an_older_one_none(tmp_path) -> None:
    story = Story(tmp_path, "ditto", rounds=3)
    first = story.waiting.written["Ulm"].read_bytes()
    replies = [story.reply(name) for name in story.names]
    again = story.site("Ulm").answer(first)
    assert again == replies[0].read_bytes()
    story.finish(replies)
    story.reply("Ulm")
    assert "it is outdated: it is number 0" in refusal(story, data=first)


def test_a_site_whose_clock_was_set_answers_again(tmp_path, monkeypatch) -> None:
    story, now = Story(tmp_path, "ditto"), messages.now
    with monkeypatch.context() as patch:
        patch.setattr(messages, "now", lambda: now() + timedelta(hours=1))
        ahead = story.reply("Ulm")
    before = ahead.read_bytes()
    _, transport = story.finish([ahead])
    assert "one of the clocks is off" in transport.refused[ahead]
    again = story.reply("Ulm")
    mine, theirs = (flatten(one.tree(None))[0] for one in (messages.read_file(again), messages.read(before)))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    _, transport = story.finish([again])
    assert transport.accepted == {"Ulm": again}


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch) -> None:
    story = Story(tmp_path, "ditto")
    write, full = store.write_whole, [True]

    def write_some(path, data):
        if full[0] and path.name.startswith("reply"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(store, "write_whole", write_some)
    with pytest.raises(DeployError, match="must have room .* It is full.\nhint: make room and give the same command"):
        story.reply("Ulm")
    with monkeypatch.context() as patch:  # not even a note of who writes has room
        patch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(DeployError, match="must have room"):
            story.reply("Ulm")
    full[0] = False
    assert messages.read_file(story.reply("Ulm")).header.round == 0


def test_what_a_site_keeps_must_be_as_it_was_written(tmp_path) -> None:
    story = Story(tmp_path, "ditto")
    story.finish([story.reply(name) for name in story.names])
    (kept,) = (tmp_path / "Ulm" / "state").rglob("kept-*")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(DeployError, match="was changed or damaged"):
        story.reply("Ulm")


# -- what a coordinator refuses ----------------------------------------------------------------------------------------


def refused(story, data, *others):
    """Return the reason for which a coordinator refuses a file."""
    path = story.folder / "forged.atoll"
    path.write_bytes(data)
    found, transport = story.finish([path, *others])
    assert isinstance(found, files.Waiting)
    return transport.refused.get(path, "")


def test_a_coordinator_refuses_by_name(tmp_path) -> None:
    story = Story(tmp_path)
    ulm = story.reply("Ulm").read_bytes()
    mallory, key, layout = Key.make("Ulm"), story.keys["Ulm"], task_without_data(story.terms).network.layout
    assert "altered" in refused(story, ulm[:-1] + bytes([ulm[-1] ^ 1]))
    assert "it was not signed with the key of Ulm" in refused(story, forge(ulm, mallory))
    assert "it belongs to another federation" in refused(story, forge(ulm, key, federation="0" * 32))
    assert "it is foreign: Bonn is not among" in refused(story, forge(ulm, key, about={"site": "Bonn"}))
    assert "it was not signed with the key of Porto" in refused(story, forge(ulm, key, about={"site": "Porto"}))
    assert "it is of a job to come" in refused(story, forge(ulm, key, number=3, round=1))
    assert "it answers another job: of another method" in refused(story, forge(ulm, key, about={"answers": "0" * 64}))
    assert "before what it answers" in refused(story, forge(ulm, key, written="2020-01-01T00:00:00+00:00"))
    assert "hint: one of the clocks is off" in refused(story, forge(ulm, key, written="2099-01-01T00:00:00+00:00"))
    assert "must be a reply of a site. It is a job" in refused(story, story.waiting.written["Ulm"].read_bytes())
    assert "9.3.0" in refused(story, forge(ulm, key, versions={"atoll": "9.3.0", "code": "?"}))
    tree = serialise.from_bytes(messages.read(ulm).body, layout)
    (one,) = tree[0]
    delta = one["result"]["delta"]

    def reply(**changes):
        return forge(ulm, key, body=serialise.to_bytes([[{**one, **changes}]], about=""))

    assert "it must be finite" in refused(story, reply(result={"delta": delta * float("nan")}))
    assert "it holds secret, which the method does not send" in refused(story, reply(result={"secret": delta}))
    assert "weight must not be negative" in refused(story, reply(weight=-one["weight"]))
    assert "it must answer for the clients [0]" in refused(story, reply(clients=one["clients"] + 1))
    assert "must say how many samples" in refused(story, forge(ulm, key, about={"samples": {"train": [3]}}))
    assert "it is not what it should be" in refused(story, forge(ulm, key, body=b"nothing"))
    same = tmp_path / "same.atoll"
    same.write_bytes(ulm)
    assert not refused(story, ulm, same)
    assert "it is duplicated: the same reply of Ulm" in refused(story, ulm)
    assert "there is another reply of Ulm already" in refused(
        story, forge(ulm, key, written="2026-11-18T00:00:00+00:00")
    )


def test_a_reply_that_is_too_large_is_refused_before_it_is_read(tmp_path) -> None:
    story = Story(tmp_path)
    path = story.reply("Ulm")
    with pytest.raises(RefusedError, match="must have at most 100 bytes. It is said to have"):
        messages.read_file(path, largest=100)
    huge = tmp_path / "huge.atoll"
    with huge.open("wb") as file:
        file.write(messages.MAGIC + (2**63).to_bytes(8, "little"))
        file.truncate(2**40)  # a hole: it takes no room
    with pytest.raises(RefusedError, match="must have at most"):
        messages.read_file(huge)


def test_a_reply_of_another_form_does_not_end_the_round(tmp_path) -> None:
    story = Story(tmp_path)
    replies = [story.reply(name) for name in story.names]
    layout = task_without_data(story.terms).network.layout
    tree = serialise.from_bytes(messages.read_file(replies[0]).body, layout)
    delta = tree[0][0]["result"]["delta"]
    tree[0][0]["result"]["delta"] = delta.only([next(iter(delta))])
    replies[0].write_bytes(forge(replies[0].read_bytes(), story.keys["Ulm"], body=serialise.to_bytes(tree, about="")))
    story.finish(replies)
    line = json.loads((story.run / "metrics.jsonl").read_text().splitlines()[0])
    assert line["lost"] == {"its reply has another form than those of the others": 1}


def test_the_federation_goes_on_without_a_site(tmp_path) -> None:
    story = Story(tmp_path, "ditto")
    found, _ = story.finish([story.reply("Ulm"), story.reply("Porto")])
    assert found.missing == ["Lund"]
    found, _ = story.finish([], without=["Lund"])
    assert found.exchange.round == 1
    late = tmp_path / "Lund" / "reply-0.atoll"  # Lund works, too late
    late.write_bytes(story.site("Lund").answer((story.run / "sites" / "exchange-000000" / "job-0.atoll").read_bytes()))
    found, transport = story.finish([late, *(story.reply(name) for name in story.names)])
    assert "outdated" in transport.refused[late]
    assert found.is_result
    report = story.play()
    assert [line["replied"] for line in report.history] == [2, 3]


def test_two_sites_with_one_name_cannot_begin() -> None:
    with pytest.raises(DeployError, match="a name and a key of its own. Two are called Ulm"):
        seat_sites([Key.make("Ulm").public, Key.make("Ulm").public])


def test_places_without_keys_belong_to_who_comes_first(tmp_path) -> None:
    write_hospital(tmp_path / "my.csv", 0)
    atoll(tmp_path, "keys", "me")
    atoll(tmp_path, "data", "schema", "my.csv", "--target", "readmitted")
    shown = atoll(
        tmp_path, "round", "start", "fedavg", "--own-schema", "schema.json", "--sites", "2", "--model", "mlp:4"
    )
    assert "whoever replies first for a place has it from then on" in shown
    assert "where its data are" in atoll(tmp_path, "round", "train", "job.atoll", fails=True)
    shown = atoll(tmp_path, "round", "train", "job.atoll", "--data", "my.csv", fails=True)
    assert "has no place for me. It has: site-1, site-2" in shown.replace("\n", " ")
    assert "--site" in shown
    atoll(tmp_path, "round", "train", "job.atoll", "--data", "my.csv", "--site", "site-2")
    atoll(tmp_path, "round", "finish", "reply.atoll")
    atoll(tmp_path, "keys", "other", "-o", "elsewhere")
    again = ["--data", "my.csv", "--site", "site-2", "--state", "other", "--key", "elsewhere/other.key"]
    atoll(tmp_path, "round", "train", "job.atoll", *again, "-o", "second.atoll")
    shown = atoll(tmp_path, "round", "finish", "second.atoll", fails=True)
    assert "there is another reply of site-2 already" in shown.replace("\n", " ")


def test_what_a_method_asks_of_sites_is_said_before(tmp_path) -> None:
    story = Story(tmp_path)
    task = task_without_data(story.terms)
    said = {name: " ".join(list_demands(create(name), task)) for name in ("fedavg", "fedora", "fedamp", "fedrep")}
    assert said["fedavg"] == ""
    assert "before the first round" in said["fedora"]
    assert "sends each site something of its own" in said["fedamp"]
    assert "its part of the server's state" in said["fedamp"]
    assert "a last step at the sites" in said["fedrep"]
    with pytest.raises(DeployError, match="FedDF needs data of the server's own"):
        list_demands(create("feddf"), task)


@pytest.mark.parametrize("method", ["feddf:server_epochs=1", "fedmd"])
def test_public_samples_are_given_to_the_coordinator(method, tmp_path) -> None:
    write_hospital(tmp_path / "public.csv", 7)
    story = Story(tmp_path, method, public=tmp_path / "public.csv")
    report = story.play()
    assert report.task.public[0].shape == (40, 4)
    assert np.isfinite(report.scores()).all()
    (tmp_path / "other.csv").write_text("age\n3\n")
    with pytest.raises(DeployError, match="must have the columns of the schema"):
        read_public(story.terms, tmp_path / "other.csv")


def test_a_site_that_is_killed_anywhere_answers_alike(tmp_path, monkeypatch) -> None:
    """Whichever write is the last one before the end, the same command then gives the same reply."""
    story = Story(tmp_path, "ditto")
    story.finish([story.reply(name) for name in story.names])  # so there is something committed to lose
    shutil.copytree(tmp_path / "Ulm", tmp_path / "before")

    def read(path):
        return [leaf.tolist() for leaf in flatten(messages.read_file(path).tree(None))[0]]

    sent = read(story.reply("Ulm"))
    real, writes = Path.replace, [0]

    def replace(path, target):
        writes[0] -= 1
        if writes[0] == 0:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    for last in range(1, 20):
        shutil.rmtree(tmp_path / "Ulm")
        shutil.copytree(tmp_path / "before", tmp_path / "Ulm")
        writes[0] = last
        try:
            story.reply("Ulm")
        except KeyboardInterrupt:
            writes[0] = 0
            assert read(story.reply("Ulm")) == sent
        else:
            break
    assert 3 <= last < 19  # what is kept, the reply, the state


def test_a_site_may_have_several_clients(tmp_path) -> None:
    for number, name in enumerate(("Lund", "Ulm")):
        write_hospital(tmp_path / name / "my.csv", number)
        atoll(tmp_path / name, "keys", name)
        carry(tmp_path / name / "keys" / f"{name}.pub", tmp_path / "center" / "sites" / f"{name}.pub")
    rows = (tmp_path / "Ulm" / "my.csv").read_text().splitlines()
    with_wards = [f"{row},{'ward' if not place else 'AB'[place % 2]}" for place, row in enumerate(rows)]
    (tmp_path / "Ulm" / "my.csv").write_text("\n".join(with_wards) + "\n")
    center = tmp_path / "center"
    atoll(center, "keys", "center")
    atoll(tmp_path / "Lund", "data", "schema", "my.csv", "--target", "readmitted")
    carry(tmp_path / "Lund" / "schema.json", center / "schema.json")
    asked = ["--own-schema", "schema.json", "--sites", "sites", "--model", "mlp:4", "--clients", "Ulm=2"]
    atoll(center, "round", "start", "fedamp", *asked, "--rounds", "1")
    atoll(tmp_path / "Lund", "round", "train", str(center / "job-Lund.atoll"), "--data", "my.csv")
    shown = atoll(tmp_path / "Ulm", "round", "train", str(center / "job-Ulm.atoll"), "--data", "my.csv", fails=True)
    assert "Ulm must have 2 client(s), as was agreed. Its data have 1" in shown.replace("\n", " ")
    wards = ["--data", "my.csv", "--client", "ward"]
    atoll(tmp_path / "Ulm", "round", "train", str(center / "job-Ulm.atoll"), *wards)
    replies = [str(tmp_path / name / "reply.atoll") for name in ("Lund", "Ulm")]
    atoll(center, "round", "finish", *replies)
    shown = atoll(tmp_path / "Lund", "round", "apply", str(center / "result-Ulm.atoll"), fails=True)
    assert "it is for Ulm, and not for Lund" in shown.replace("\n", " ")
    shown = atoll(tmp_path / "Ulm", "round", "apply", str(center / "result-Ulm.atoll"))
    assert sorted(path.stem for path in (tmp_path / "Ulm" / "models").iterdir()) == ["A", "B"]
    assert shown.count("personal") == 2


def test_a_method_of_ones_own_runs_where_its_file_is_allowed(tmp_path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\n\nfrom atoll import Algorithm, Update\n"
        "from atoll.toolbox.client import sgd\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Mine(Algorithm):\n"
        "    def local(self, w, cohort):\n"
        "        return Update(send={'delta': sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)\n"
    )
    story = Story(tmp_path, str(mine))
    assert "whose file is not allowed here" in refusal(story)
    assert messages.read_file(story.reply("Ulm", allowed=[mine])).header.kind == "reply"
    mine.write_text(mine.read_text() + "\n# changed\n")
    assert "whose file is not allowed here" in refusal(story, "Porto", allowed=[mine])


def protect_five(folder: Path, method: str, *words: str) -> list[str]:
    """Play a federation under protection by commands, until there is a report; return what was shown."""
    center, homes = folder / "center", [folder / name for name in NAMES]
    for number, home in enumerate(homes):
        write_hospital(home / "my.csv", number, samples=30)
        atoll(home, "keys", home.name)
        carry(home / "keys" / f"{home.name}.pub", center / "sites" / f"{home.name}.pub")
    atoll(center, "keys", "center")
    atoll(homes[0], "data", "schema", "my.csv", "--target", "readmitted")
    carry(homes[0] / "schema.json", center / "schema.json")
    asked = ["--own-schema", "schema.json", "--sites", "sites", "--model", "mlp:4", "--rounds", "1", *words]
    shown = [atoll(center, "round", "start", method, *asked, "-o", "next.atoll")]
    for turn in range(10):
        if (center / "federation" / "report.html").exists():
            return shown
        for home in homes:
            one = center / f"next-{home.name}.atoll"
            job = home / "job.atoll"
            carry(one if one.exists() else center / "next.atoll", job)
            shown.append(atoll(home, "round", "show", "job.atoll"))
            command = "apply" if "scores of models" in shown[-1] else "train"
            atoll(home, "round", command, "job.atoll", "--data", "my.csv", "-o", "reply.atoll")
            shown.append(atoll(home, "round", "show", "reply.atoll"))
            carry(home / "reply.atoll", center / f"replies-{turn}" / f"{home.name}.atoll")
        for old in center.glob("next*.atoll"):
            old.unlink()
        shown.append(atoll(center, "round", "finish", f"replies-{turn}", "-o", "next.atoll"))
    raise AssertionError("the federation did not end")


def test_private_sums_under_masks_by_file(tmp_path) -> None:
    """Five exchanges of files: keys, shares, the work, shares that unmask, and the result with its scores."""
    shown = protect_five(tmp_path, "ditto", "--secure", "masks", "--dp", "client:epsilon=8,delta=0.1,clip=1")
    assert "four exchanges a round" in shown[0]
    assert "no promise of privacy covers them" in " ".join(shown[0].split())
    text = " ".join(" ".join(shown).split())
    for words in (
        "for: public keys for a sum under masks.",
        "for: sealed shares of the secrets behind its masks.",
        "for: a round's work.",
        "for: shares that remove the masks from the sum, and from no single message.",
        "given a share of noise from this site's operating system",
        "put under masks, so the coordinator reads the sum of all clients only",
        "It does not say how many samples the site's clients have.",
        "drawn at each site from the operating system's generator",
    ):
        assert words in text, words


def test_packed_messages_and_the_servers_noise_by_file(tmp_path) -> None:
    shown = protect_five(tmp_path, "fedavg", "--compress", "randk:0.5", "--dp", "client:noise=1,delta=0.1")
    assert "reads every message before it adds any" in " ".join(shown[0].split())
    assert "packed by randk" in shown[1]
    assert "drawn by the server, which is trusted with it" in " ".join(shown[-1].split())
    assert (tmp_path / "center" / "federation" / "noise.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("fedamp", ["--secure", "masks"], "hide single replies"),
        ("fedavg", ["--secure", "sums"], "hides nothing"),
        ("fedavg", ["--dp", "client:noise=1"], None),
        ("fedavg", ["--dp", "client:noise=1,delta=0.5"], "`delta` must be below 1 over the number of clients"),
        ("fedavg+dpsgd", [], "would protect no sample"),
        ("fedavg", ["--compress", "topk:2"], "`topk` must be given with a share"),
        ("fedavg", ["--aggregate", "krum:3"], "krum"),
    ],
)
def test_a_protection_is_checked_before_the_first_job(tmp_path, method, words, said) -> None:
    write_hospital(tmp_path / "my.csv", 0)
    atoll(tmp_path, "keys", "center")
    atoll(tmp_path, "data", "schema", "my.csv", "--target", "readmitted")
    asked = ["--own-schema", "schema.json", "--sites", "4", "--model", "mlp:4", *words]
    shown = atoll(tmp_path, "round", "start", method, *asked, fails=said is not None)
    assert (tmp_path / "federation").exists() == (said is None)
    if said is not None:
        assert said in " ".join(shown.split())
