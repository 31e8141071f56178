import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from atoll.data.partition import Dirichlet, Iid, parse
from atoll.data.statistics import Statistics, statistics
from atoll.report.partition import describe_picture, draw_partition, save_picture


def rng(seed=0):
    return np.random.default_rng(seed)


def dealt(clients, classes=10, partition=None, **others):
    labels = np.repeat(np.arange(classes), 12_000 // classes)
    parts = (partition or Dirichlet(0.5, min_samples=1)).split(labels, clients, rng())
    return statistics(labels, parts, classes, **others)


def tags(svg):
    """How often each tag occurs; fails if the text is not well-formed."""
    found = [element.tag.rpartition("}")[2] for element in ET.fromstring(svg).iter()]
    return {tag: found.count(tag) for tag in set(found)}


def notes(svg):
    return [title.text for title in ET.fromstring(svg).iter("title")]


@pytest.mark.parametrize("clients", [1, 5, 20, 100, 200])
@pytest.mark.parametrize("classes", [2, 10, 100, 250])
def test_every_client_is_drawn_and_says_what_it_has(clients, classes):
    found = dealt(clients, classes, Iid())
    svg = draw_partition(found)
    columns = [note for note in notes(svg) if note.startswith("client ")]
    assert len(columns) == clients
    assert columns[0].startswith(f"client 0: {found.samples[0]:,} samples; ")
    assert f" of {classes} classes" in columns[0]
    assert len(svg) < 400_000
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_disc_for_every_class_a_client_has_with_its_area():
    labels = np.repeat([0, 1, 0], [100, 25, 50])
    found = statistics(labels, [np.arange(125), np.arange(125, 175)], 2)
    svg = draw_partition(found)
    radii = sorted(float(radius) for radius in re.findall(r'<circle [^>]*r="([\d.]+)"', svg))
    assert len(radii) == 3
    assert radii[2] / radii[0] == pytest.approx(2, rel=0.05)  # four times the samples
    assert radii[2] / radii[1] == pytest.approx(2**0.5, rel=0.05)


def test_a_crowd_is_shaded_with_few_elements():
    found = tags(draw_partition(dealt(200)))
    assert "circle" not in found
    assert found["path"] < 60


def test_groups_are_marked():
    partition = parse("iid+rotation:4")
    found = dealt(8, partition=partition, groups=partition.groups(8))
    marked = draw_partition(found)
    assert marked.count('height="12"') == 8
    assert 'height="12"' not in draw_partition(dealt(8, partition=partition))
    assert notes(marked)[-1].endswith("group 3")
    assert "planted groups" in describe_picture(found)


def test_names_are_escaped():
    found = dealt(2, names=["a<b>", "c"])
    assert "client a<b>: " in " ".join(notes(draw_partition(found)))


def test_numbers_have_a_mean_and_a_spread():
    found = statistics(rng().normal(size=60), np.split(np.arange(60), 6), None)
    svg = draw_partition(found)
    assert tags(svg)["circle"] == 6
    assert "target, mean ± std" in svg
    assert "mean of its targets" in describe_picture(found)
    assert tags(draw_partition(statistics(np.ones(4), [np.arange(4)], None)))["circle"] == 1


def test_very_many_clients_become_histograms():
    found = dealt(3000, partition=Dirichlet(0.5, min_samples=0))
    svg = draw_partition(found)
    assert len(svg) < 20_000
    assert "divergence of its labels, bits" in svg
    assert describe_picture(found).startswith("The number of clients")
    # the bars of the first histogram hold all clients: heights are shares of the highest
    bars = re.search(r'fill-opacity="0.7" d="([^"]+)"', svg)[1]
    heights = np.array([float(height) for height in re.findall(r"v-([\d.]+)", bars)])
    highest = int(re.search(r">([\d,]+)</text>", svg)[1].replace(",", ""))
    assert heights.sum() / heights.max() * highest == pytest.approx(3000, rel=0.02)


def test_equal_clients_can_be_drawn_in_any_number():
    labels = np.tile([0, 1], 500)
    for clients in (5, 250):
        tags(draw_partition(statistics(labels, np.split(np.arange(1000), clients), 2, features=np.ones((1000, 1)))))


def test_without_counts_there_are_still_sizes():
    found = Statistics.of_json({name: value for name, value in dealt(5).as_json().items() if name != "counts"})
    assert "samples of a client" in draw_partition(found)


def test_a_client_without_samples_is_drawn():
    found = statistics(np.array([0, 1]), [np.arange(2), np.array([], dtype=np.int64)], 2)
    svg = draw_partition(found)
    assert "client 1: 0 samples" in notes(svg)
    assert "nan" not in svg


def test_a_file_of_its_own(tmp_path):
    path = tmp_path / "partition.svg"
    save_picture(dealt(5), path)
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].tag.endswith("style")
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
