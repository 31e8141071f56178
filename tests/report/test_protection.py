"""What a report says about attacks, rules, promises, sums and packing; and what an audit adds to it."""

import json
import re

import pytest

from atoll import audit, federate
from atoll.algorithms import FedAvg
from atoll.experiments.comparison import Comparison
from atoll.federation.report import Report
from atoll.kernel.errors import RunError
from atoll.report.html import render_page
from atoll.report.protection import attack_success, list_threats, write_protection
from atoll.report.summary import write_summary

SIZES, SHARES = (8,) * 10, (0.5, 0.2, 0.3)


@pytest.fixture
def run(make_task):
    def run_methods(*methods, **more):
        task = make_task(sizes=SIZES, shares=SHARES)
        return Comparison.of_runs([federate(task, method, rounds=2, progress=False, **more) for method in methods])

    return run_methods


def section(text, head):
    found = re.search(rf"<h2[^>]*>{head}</h2>(.*?)</section>", text, re.DOTALL)
    return None if found is None else found[1]


def test_a_plain_run_has_no_such_section(run):
    plain = run("fedavg")
    assert write_protection(plain) == []
    text = render_page(plain)
    assert [section(text, head) for head in ("What was protected", "What an audit found", "Who contributes")] == [
        None
    ] * 3


def test_attack_and_rule_are_said_with_who_is_scored(run):
    found = run("fedavg", attack="sign-flip:0.2", aggregate="nnm+trimmed")
    attack, rule = write_protection(found)
    assert attack == (
        "2 of 10 clients attack (sign-flip). They are not scored: every score here is of the 8 honest clients."
    )
    assert rule.endswith("bears at most 4 hostile ones of 10 in a round. It is set to bear 2.")
    assert rule in write_summary(found)
    shown = section(render_page(found), "What was protected")
    assert attack in shown
    assert rule in shown
    assert "Not bounded." in list_threats(found)["Whoever gets the shared model, other clients too"]


def test_the_mean_under_attack_is_called_what_it_is(run):
    assert "plain mean, which any single one of them can move" in write_protection(run("fedavg", attack="ipm:0.2"))[0]


def test_attack_success_stands_beside_the_score(run):
    found = run("fedavg", "local", attack="backdoor:0.2")
    success = attack_success(found)
    assert set(success) == {"fedavg", "local"}
    sentence = next(one for one in write_protection(found) if "trigger" in one)
    mean = {row["method"]: row["mean"] for row in found.results}
    assert f"{100 * success['fedavg']:.1f} % with FedAvg (accuracy {100 * mean['fedavg']:.1f} %)" in sentence
    shown = section(render_page(found), "What was protected")
    line = re.search(r'<th scope="row">fedavg</th>(.*?)</tr>', shown)[1]
    assert f">{100 * success['fedavg']:.1f}<" in line
    assert f">{100 * mean['fedavg']:.1f}<" in line
    assert "fedavg: Not protected: the mean follows any" in shown
    assert "local: Clients use nothing of each other." in shown


def test_what_is_promised_about_clients_and_what_it_covers(run):
    pytest.importorskip("dp_accounting", reason="needs `pip install 'atoll[privacy]'`")
    found = run("fedavg", "ditto", dp="client:noise=2,delta=1e-3")
    promise, together = write_protection(found)  # both promise the same, so it is said once
    assert together.startswith("All ")
    assert promise.startswith("Client-level differential privacy: epsilon")
    epsilon = f"{found.example.client_epsilon:.2f}"
    threats = list_threats(found)
    assert epsilon in threats["Whoever gets the shared model, other clients too"]
    assert "must be trusted" in threats["The server"]
    assert "does not cover what a client keeps" in threats["Whoever gets a personal model"]
    assert "no more than the norm" in threats["Clients that mean harm"]
    assert epsilon in section(render_page(found), "What was protected")


def test_what_is_promised_about_samples_is_said_client_by_client(run):
    found = run("fedavg", "fedavg+dpsgd:noise=2")
    promise = next(one for one in write_protection(found) if "Sample-level" in one)
    assert promise.startswith("FedAvg+dpsgd")
    private = found.outcomes["fedavg+dpsgd:noise=2.0"][0]
    assert len(private.sample_epsilons) == 10
    shown = section(render_page(found), "What was protected")
    assert "Epsilon of each client" in shown
    assert shown.count("data-client") == 10
    assert "fedavg: Not protected: it reads every message." in list_threats(found)["The server"]


def test_local_noise_protects_from_the_server_too(run):
    found = run("fedavg", dp="local:noise=4,delta=1e-3")
    assert f"epsilon {found.example.client_epsilon:.2f}" in list_threats(found)["The server"]
    assert "had their noise before" in list_threats(found)["The server"]


def test_sums_and_packing_are_said(run):
    assert "sums of replies only" in write_protection(run("fedavg", secure="sums"))[0]
    assert "hides nothing" in write_protection(run("fedavg", compress="topk:0.1"))[0]
    assert list_threats(run("fedavg", secure="sums"))["The server"] == "It reads sums only, never a single message."


def test_a_report_shows_what_an_audit_found_and_who_contributes(make_task, tmp_path):
    task = make_task(sizes=(12,) * 4, shares=(0.5, 0.25, 0.25))
    report = federate(task, FedAvg(), rounds=2, folder=tmp_path / "run", progress=False)
    found = audit(report, attacks=["labels"], contribution=True)
    found.save(tmp_path / "run" / "audit")
    page = render_page(Comparison.of_runs([Report.read(tmp_path / "run")]))
    assert found.labels is None or "class shares" in section(page, "What an audit found")
    shown = section(page, "Who contributes")
    rows = re.findall(r'<th scope="row">(.*?)</th><td[^>]*>(.*?)</td>', shown)
    given = found.contribution
    order = sorted(range(4), key=lambda client: -given.shapley[client])
    assert [name for name, _ in rows] == [given.names[client] for client in order]
    assert [value for _, value in rows] == [f"{100 * one:+.2f}" for one in sorted(given.shapley)[::-1]]


def test_an_audit_that_was_changed_is_named(make_task, tmp_path):
    task = make_task(sizes=(12,) * 4, shares=(0.5, 0.25, 0.25))
    report = federate(task, FedAvg(), rounds=1, folder=tmp_path / "run", progress=False)
    path = audit(report, attacks=["labels"]).save(tmp_path / "run" / "audit")["figures"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "sentences": ["All is well."]}))
    with pytest.raises(RunError, match=r"audit\.json was changed"):
        render_page(Comparison.of_runs([Report.read(tmp_path / "run")]))
