import json
import re
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from atoll import Task, compare
from atoll.data.recipe import Recipe
from atoll.experiments.comparison import Comparison
from atoll.kernel.clusters import Clusters
from atoll.report.html import render_page
from atoll.report.sections import classes
from atoll.report.summary import write_summary

ERROR = {"name": "mean absolute error", "higher_is_better": False, "share": False}
SECTIONS = [
    "Results", "Summary", "What each client gains", "Learning curves", "Score against megabytes",
    "How scores are spread", "Groups of clients", "Who has what", "Client by client", "What it costs", "Configuration",
    "Please cite",
]  # fmt: skip
SCORES = {
    "local": [[0.8, 0.9, 0.7], [0.82, 0.91, 0.7]],
    "fedavg": [[0.9, 0.5, 0.8], [0.92, 0.51, 0.8]],
    "ditto": [[0.9, 0.93, 0.83], [0.94, 0.95, 0.85]],
}


@pytest.fixture
def found(make) -> Comparison:
    return make(SCORES)


def svgs(text):
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


def heads(text):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", text)


def section(text, head):
    return re.search(rf"<h2[^>]*>{head}</h2>(.*?)</section>", text, re.DOTALL)[1]


def cells(text, row):
    """The cells of the first row with this head."""
    line = re.search(rf'<th scope="row">{re.escape(row)}</th>(.*?)</tr>', text)[1]
    return re.findall(r"<td[^>]*>(.*?)</td>", line)


def shown_data(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


def test_the_page_needs_nothing_from_elsewhere(found):
    text = render_page(found)
    assert not re.search(r"<link|<img|<iframe|\ssrc=|@import|https?://(?!arxiv|doi|proceedings)", text)
    assert all(address.startswith("#") for address in re.findall(r'href="([^"]*)"', text))
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))


def test_every_link_leads_somewhere(found):
    text = render_page(found)
    places = {*re.findall(r'id="([^"]+)"', text)}
    assert {*re.findall(r'href="#([^"]+)"', text)} <= places
    assert {*re.findall(r"url\(#([^)]+)\)", text)} <= places
    assert {*re.findall(r'aria-labelledby="([^"]+)"', text)} <= places
    assert len(places) == len(re.findall(r'id="([^"]+)"', text))  # each once


def test_every_section_is_there_in_order(found):
    assert heads(render_page(found)) == SECTIONS


def test_every_figure_is_well_formed_and_has_a_name(found):
    drawn = svgs(render_page(found))
    assert len(drawn) > 8
    for svg in drawn:
        root = ET.fromstring(svg)
        assert "nan" not in svg
        named = root.get("aria-label") or root.find("title") is not None
        assert named or root.get("aria-hidden") == "true"


def test_the_summary_is_on_the_page(found):
    shown = re.sub(r"<[^>]+>", "", section(render_page(found), "Summary"))
    for sentence in write_summary(found):
        assert sentence in unescape(shown)


def test_the_numbers_of_the_table(found):
    table = section(render_page(found), "Results")
    ditto = cells(table, "ditto")
    assert ditto[1:4] == ["90.0 ± 16.9", "84.0", "84.0"]
    assert "+9.5" in ditto
    assert "1 ▼" in cells(table, "fedavg")  # the second client, in both seeds
    details = table[table.index("<details>") :]
    assert cells(details, "Jain")[2] == "0.998"
    assert cells(details, "Decile p50") == ["81.0", "80.0", "92.0"]
    assert cells(details, "Clients that gain vs Local") == ["0", "2", "3"]


def test_every_table_says_or_links_its_protocol(found):
    text = render_page(found)
    assert f'id="protocol">{re.escape("Accuracy")}' in text
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    assert len(tables) >= 6
    for table in tables:
        assert 'href="#protocol"' in table or 'class="words"' in table
        assert table.count("<th scope=") >= 2


HOSTILE = (
    """</script></title><script>alert(1)</script><img src=x onerror='alert("2")'> & {{ 7 * 7 }} {% raw %} {# "'`"""
)


class Outline(HTMLParser):
    """What a browser makes of a page: its elements with their attributes' names, and all of its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, [name for name, _ in attrs]))
        self.texts += [value or "" for _, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def called(make, name):
    """A comparison with every section in which all that comes from outside is called so."""
    stages = {str(epochs): {"macro": 0.5, "clients": [0.5]} for epochs in (0, 1)}
    tree = Clusters(np.array([0, 0, 1]), np.array([[0.0, 1.0, 0.5, 2.0], [3.0, 2.0, 2.0, 3.0]]), f"height {name}")
    found = make(
        SCORES, names=[f"client {name}{number}" for number in range(3)], task_name=f"task {name}",
        command=f"command {name}", missing=[f"missing {name}"], metric={**ERROR, "name": f"metric {name}"},
        mixing=np.eye(3).tolist(), clusters=tree, newcomers={"labelled": stages, "unlabelled": {"way": "none"}},
    )  # fmt: skip
    return Comparison({f"{method} {name}": of for method, of in found.outcomes.items()}, missing=found.missing)


def test_no_name_is_taken_for_markup(make):
    tame, hostile = (Outline(render_page(called(make, name))) for name in ("x" * len(HOSTILE), HOSTILE))
    assert len(tame.tags) > 500
    assert hostile.tags == tame.tags
    shown = "\n".join(hostile.texts)
    for what in ("client", "task", "command", "missing", "metric", "height", "ditto"):
        assert f"{what} {HOSTILE}" in shown


def test_the_script_reads_names_as_they_are(make):
    data = shown_data(render_page(called(make, HOSTILE)))
    assert data["clients"]["0"][0] == f"client {HOSTILE}0"
    assert data["methods"][2] == f"ditto {HOSTILE}"


def test_what_the_script_shows_of_a_client(found):
    data = shown_data(render_page(found))
    assert data["methods"] == ["local", "fedavg", "ditto"]
    name, samples, figures = data["clients"]["1"]
    assert (name, samples) == ("1", 100)
    assert figures == [["90.0", "", 0], ["50.0", "-40.0", 1], ["93.0", "+3.0", 0]]


def test_harmed_clients_are_marked(found):
    text = render_page(found)
    assert "2 of 3 gain, ▼ 1 harmed" in section(text, "What each client gains")
    assert cells(section(text, "Client by client"), "1") == ["100", "90.0", "▼ 50.0", "93.0"]


def test_a_page_says_which_seeds_its_clients_are_of(make):
    assert "Seed 0 only: every seed has other clients." in render_page(make(SCORES))
    same = render_page(make(SCORES, same=True))
    assert "Means over 2 seeds, which have the same clients." in same
    assert cells(section(same, "Client by client"), "0")[1] == "81.0"  # of 0.80 and 0.82


def test_what_is_missing_is_said_once(make):
    assert "not finished" not in render_page(make(SCORES))
    listed = render_page(make(SCORES, missing=["Left out: <seed 3>."]))
    assert "This comparison is not finished; showing the rounds so far." in listed
    assert "Left out: &lt;seed 3&gt;." in listed
    alone = render_page(make({"ditto": [[0.9, 0.8]]}, rounds=9))
    assert "This run is not finished; showing the rounds so far." in alone
    begun = render_page(make(SCORES, rounds=9))
    assert begun.count("ditto with seed 1 is incomplete: 3 of 9 rounds.") == 1
    both = render_page(make(SCORES, rounds=9, missing=["ditto with seed 1 is incomplete: 3 of 9 rounds."]))
    assert both.count("ditto with seed 1 is incomplete: 3 of 9 rounds.") == 1


def test_runs_of_different_length_are_shown_as_far_as_all_are(make):
    long, short = make({"ditto": [[0.5, 0.6]]}), make({"ditto": [[0.5, 0.6]]}, curve=(0.5,), rounds=3)
    both = Comparison({"ditto": [long.example, *_seeded(short, 1)]})
    assert section(render_page(both), "Learning curves").count('class="dot"') == 2  # one point, wide and narrow


def _seeded(comparison, seed):
    from dataclasses import replace

    (one,) = comparison.first
    settings = replace(one.settings, seed=seed)
    return [replace(one, written=replace(one.config, settings=settings))]


def test_a_single_run_shows_what_makes_sense(make):
    text = render_page(make({"ditto": [[0.9, 0.8]]}))
    assert "What each client gains" not in heads(text)
    assert "Gain vs Local" not in text
    assert '<ul class="legend"' not in text
    assert "★" not in text
    assert "Learning curves" in heads(text)


def test_without_local_scores_are_shown(make):
    text = render_page(make({"fedavg": [[0.9, 0.8]], "ditto": [[0.9, 0.9]]}))
    assert "What each client gains" not in heads(text)
    assert "How scores are spread" in heads(text)
    assert "harmed" not in section(text, "Client by client")


def test_a_score_that_is_no_share_and_better_when_lower(make):
    text = render_page(
        make({"local": [[1.2, 2.0]], "ditto": [[0.8, 2.5]]}, metric=ERROR, variances=[0.1, 0.1], curve=(2.0, 1.5, 1.25))
    )
    assert "validation mean absolute error<" in text
    assert "in %" not in section(text, "Learning curves")
    assert "median 1.65, worst 2.5, best 0.8" in text
    assert "+0.4" in shown_data(text)["clients"]["0"][2][1]
    assert "ECE" not in section(text, "Results")


def test_who_learns_from_whom_where_it_is_known(make, found):
    assert "Who learns from whom" not in heads(render_page(found))
    text = render_page(make(SCORES, mixing=[[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]]))
    assert "client 2 takes 0.6 from 2, 0.2 from 0, 0.2 from 1" in section(text, "Who learns from whom")


def test_new_clients_where_some_were_held_out(make, found):
    stages = {str(epochs): {"macro": 0.5 + epochs / 100, "clients": [0.5, 0.5]} for epochs in (0, 1, 5, 10)}
    held_out = make(SCORES, newcomers={"labelled": stages, "unlabelled": {"way": "shared", "macro": 0.4}})
    told = section(render_page(held_out), "New clients")
    assert cells(told, "ditto") == ["40.0 °", "50.0", "51.0", "55.0", "60.0"]
    assert "2 clients that took no part" in told
    assert len(svgs(told)) == 2
    assert told.count('class="dot"') == 2 * 3 * 4  # wide and narrow, methods, stages
    assert "test accuracy in %" in told
    assert "New clients" not in heads(render_page(found))
    places = re.findall(r'id="([^"]+)"', render_page(held_out))
    assert len(places) == len({*places})


def test_clusters_where_some_were_found(make, found):
    assert "Clusters" not in heads(render_page(found))
    tree = Clusters(np.array([0, 0, 1]), np.array([[0.0, 1.0, 0.5, 2.0], [3.0, 2.0, 2.0, 3.0]]), "distance <l2>")
    text = render_page(make(SCORES, clusters=tree, groups=[4, 4, 7]))
    shown = section(text, "Clusters")
    assert "Ditto found 2 clusters with each of 2 seeds, in exact agreement with the planted groups" in shown
    assert cells(shown, "0") == ["2", "2 of group 4", "0, 1"]
    assert cells(shown, "1") == ["1", "1 of group 7", "2"]
    assert "client 2 is in cluster 1, of planted group 7" in shown
    assert "distance &lt;l2&gt;" in shown
    assert "Seed 0; other seeds have other clusters." in shown
    details = section(text, "Results")
    assert cells(details, "Adjusted Rand index of clusters and planted groups") == ["1.000"] * 3
    for svg in svgs(shown):
        ET.fromstring(svg)


def test_clusters_without_tree_and_planted_groups(make):
    nobody = Clusters(np.array([3, -1, 3]))
    text = render_page(make({"local": [SCORES["local"][0]], "ditto": [SCORES["ditto"][0]]}, clusters=nobody))
    shown = section(text, "Clusters")
    assert "Ditto found 1 cluster. 1 client is in no cluster." in shown
    assert "planted" not in shown
    assert "client 1 is in no cluster" in shown
    assert cells(shown, "3") == ["2", "0, 2"]
    assert cells(shown, "none") == ["1", "1"]
    assert 'class="branch' not in shown


def test_clients_without_test_samples_are_left_out_of_figures(make):
    nan = float("nan")
    text = render_page(make({"local": [[0.5, 0.6, nan]], "ditto": [[0.7, 0.5, nan]]}, samples=[9, 9, 0]))
    assert "1 of 2 gain" in text
    assert cells(section(text, "Client by client"), "2") == ["0", "–", "–"]


def test_a_thousand_clients_make_a_small_file_that_says_what_it_leaves_out(make):
    local = np.linspace(0.2, 0.8, 1000)
    text = render_page(make({"local": [local.tolist()], "ditto": [(local + 0.1 * np.cos(np.arange(1000))).tolist()]}))
    assert len(text) < 700_000
    assert "200 of 1000 clients, sorted by gain" in text
    assert "200 of them are drawn" in text
    assert "The first 200; clients.csv has all." in text
    assert section(text, "Client by client").count("<tr data-client") == 200


def test_the_page_is_readable_without_its_script(found):
    text = render_page(found)
    without = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
    assert len(re.findall(r"<script", text)) == 2
    assert re.findall(r"<[^>]* hidden[ >]", without) == ['<div id="tip" role="status" hidden>']


# -- what comes first --------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_then_the_table_then_figures(found):
    text = render_page(found)
    verdict, table, figure = (text.index(part) for part in ('class="verdict"', "<table", "<figure"))
    assert verdict < table < figure
    assert text.index('id="protocol"') > table


def test_every_client_has_its_gain_with_every_method(found):
    rows = section(render_page(found), "What each client gains")
    heat = rows[rows.index('<table class="heat"') : rows.index("</table>")]
    order = re.findall(r'<tr data-client="(\d)"', heat)
    assert order == ["1", "0", "2"]  # the smallest mean gain first
    fedavg, ditto = cells(heat, "1")
    assert (fedavg, ditto) == ("▼ -40.0", "+3.0")
    kinds = re.findall(r'<td class="(\w+?)(\d)"', heat)
    assert ("down", "4") in kinds
    assert all(step in "1234" for _, step in kinds)
    assert 'aria-label="Gains of clients with each method; scrolls"' in rows


def test_many_clients_are_scrolled_in_a_box(make):
    scores = np.linspace(0.2, 0.9, 140)
    text = render_page(
        make({"local": [scores], "ditto": [scores[::-1]]}, names=[f"person {k:03d}" for k in range(140)])
    )
    assert 'class="scroll tall"' in text
    heat = text[text.index('<table class="heat"') :]
    assert heat.count("<tr data-client", 0, heat.index("</table>")) == 140


def test_errors_that_shrink_are_gains_and_blue(make):
    found = make({"local": [[4.0, 2.0]], "ditto": [[1.0, 3.0]]}, metric=ERROR, variances=[0.01, 0.01])
    heat = section(render_page(found), "What each client gains")
    assert re.search(r'<td class="up\d" data-method="1">\+3</td>', heat)
    assert re.search(r'<td class="down\d" data-method="1">▼ -1</td>', heat)


def test_classes_and_clients_have_their_names_everywhere():
    frames = {
        site: {"x": np.random.default_rng(k).normal(size=(40, 3)), "y": ["well", "ill"] * 20}
        for k, site in enumerate(["St. Mary's", "Hôpital Georges-Pompidou", "Ulm"])
    }
    found = compare(Task.own(frames, target="y"), ["local", "fedavg"], seeds=2, rounds=1, metric="f1")
    text = unescape(render_page(found))
    for head in ("What each client gains", "Who has what", "Client by client"):
        assert "Hôpital Georges-Pompidou" in section(text, head), head
    assert re.search(r'<th scope="row">ill</th>', section(text, "Class by class"))
    assert ">well</text>" in section(text, "Who has what")
    confusion = found.confusion("local")
    assert f">{confusion[0, 0]}</td>" in section(text, "Class by class")
    rows = section(text, "Configuration")
    for words in ("cut at random", "mean and standard deviation of its own training samples", "name = MLP"):
        assert words in rows, words


def test_of_many_classes_the_hardest_are_listed_and_the_most_confused(monkeypatch):
    monkeypatch.setattr(classes, "MOST_CLASSES", 3)
    monkeypatch.setattr(classes, "MOST_CONFUSED", 4)
    found = compare(Recipe("digits", clients=3), ["local", "fedavg"], seeds=1, rounds=1)
    text = section(render_page(found), "Class by class")
    assert "The 3 hardest of 10 classes" in text
    assert "The most frequent wrong answers." in text
