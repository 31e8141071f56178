import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from atoll.kernel.clusters import Clusters
from atoll.report.bins import draw_bins
from atoll.report.drawing import NARROW, WIDTH, find_decades, find_ticks, move_apart, pick_evenly
from atoll.report.figures import (
    MOST_MARKS,
    MOST_MIXING,
    Line,
    assign_styles,
    draw_clusters,
    draw_curves,
    draw_gains,
    draw_heatmap,
    draw_strips,
    write_palette,
)


def drawn(svg, kind, tag="*"):
    """The elements of a class; fails if the text is not well-formed."""
    return [one for one in ET.fromstring(svg).iter() if kind in one.get("class", "").split() and tag in ("*", one.tag)]


def texts(svg):
    return [one.text for one in ET.fromstring(svg).iter("text")]


def place(mark):
    """Where a marker is: across and down."""
    return [float(number) for number in re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", mark.get("transform")).groups()]


def bars(values, harmed=None, names=None, ticks=(-40, -20, 0, 20, 40)):
    values = np.array(values, dtype=float)
    harmed = np.zeros(len(values), bool) if harmed is None else np.array(harmed)
    names = [str(client) for client in range(len(values))] if names is None else names
    notes = [f"client {name}" for name in names]
    return draw_gains(values, harmed, names, notes, assign_styles(["ditto"])["ditto"], ticks, "Gains")


# -- curves ------------------------------------------------------------------------------------------------------------


def one_line(*points):
    return Line([(x, y, half, f"note {x}") for x, y, half in points])


def test_a_line_has_its_points_its_band_and_its_name():
    lines = {"ditto": one_line((1, 50.0, 5.0), (2, 60.0, 4.0)), "local": one_line((1, 40.0, None), (2, 45.0, None))}
    svg = draw_curves(lines, assign_styles(list(lines)), "T", "round", "accuracy in %")
    assert len(drawn(svg, "line")) == 2
    assert len(drawn(svg, "dot")) == 4
    assert len(drawn(svg, "band")) == 1  # local has no interval
    assert {"ditto", "local", "round", "accuracy in %"} <= {*texts(svg)}
    narrow = draw_curves(lines, assign_styles(list(lines)), "T", "round", "accuracy in %", width=NARROW)
    assert "ditto" not in texts(narrow)  # the legend says it
    assert f'viewBox="0 0 {NARROW} ' in narrow


def test_higher_is_higher_up():
    svg = draw_curves({"a": one_line((1, 10.0, None), (2, 90.0, None))}, assign_styles(["a"]), "T", "round", "y")
    low, high = (place(dot)[1] for dot in drawn(svg, "dot"))
    assert high < low


def test_wide_bands_do_not_flatten_the_lines():
    lines = {"a": one_line((1, 50.0, 400.0), (2, 60.0, 400.0))}
    svg = draw_curves(lines, assign_styles(["a"]), "T", "round", "y", most=100)
    low, high = (place(dot)[1] for dot in drawn(svg, "dot"))
    assert low - high >= 0.4 * 270  # of the height of the plot
    assert max(float(text) for text in texts(svg) if re.fullmatch(r"-?[\d.]+", text or "")) <= 100
    assert drawn(svg, "band")[0].get("clip-path") == "url(#plot-round-760)"
    assert 'clipPath id="plot-round-760"' in svg


def test_there_is_no_round_and_a_half():
    svg = draw_curves({"a": one_line((1, 1.0, None), (2, 9.0, None))}, assign_styles(["a"]), "T", "round", "y")
    across = [one.text for one in ET.fromstring(svg).iter("text") if one.get("y") == "318.0"]
    assert across == ["0", "1", "2"]


def test_a_logarithmic_axis_gives_every_decade_the_same_room():
    points = one_line((1, 1.0, None), (10, 2.0, None), (100, 3.0, None))
    svg = draw_curves({"a": points}, assign_styles(["a"]), "T", "megabytes", "y", log=True)
    first, second, third = (place(dot)[0] for dot in drawn(svg, "dot"))
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert {"1", "10", "100"} <= {*texts(svg)}


def test_nothing_to_draw_is_no_figure():
    assert draw_curves({"a": Line([])}, assign_styles(["a"]), "T", "round", "y") == ""
    assert bars([np.nan]) == ""
    assert draw_strips({"a": np.array([np.nan])}, {"a": "a"}, {"a": ["a"]}, assign_styles(["a"]), "T", "x") == ""


# -- clients -----------------------------------------------------------------------------------------------------------


def test_clients_are_sorted_by_gain():
    root = ET.fromstring(bars([5, -30, 20]))
    assert [one.get("data-client") for one in root.iter("g") if one.get("data-client")] == ["2", "0", "1"]


def test_harmed_clients_have_another_shape():
    svg = bars([10, -5, -30], harmed=[False, False, True])
    assert len(drawn(svg, "bar")) == 3
    assert len(drawn(svg, "harmed")) == 1
    assert len(drawn(svg, "mark")) == 1


def test_a_bar_is_as_long_as_its_gain():
    heights = [float(bar.get("height")) for bar in drawn(bars([10, -20]), "bar")]
    assert heights[1] / heights[0] == pytest.approx(2, rel=0.02)


def test_names_stand_below_where_there_is_room_long_ones_upright():
    assert "7" in texts(bars(np.arange(8.0)))
    assert "7" not in texts(bars(np.arange(100.0) / 10))
    svg = bars([1, 2], names=["person 1", "a hospital with a very long name"])
    assert {"person 1", "a hospital with a very lo…"} <= {*texts(svg)}
    turned = [one for one in ET.fromstring(svg).iter("text") if (one.get("transform") or "").startswith("rotate(-90")]
    assert len(turned) == 2
    height = float(svg.split('viewBox="0 0 360 ')[1].split('"')[0])
    assert all(float(one.get("y")) + 5.6 * len(one.text) < height - 16 for one in turned)  # above what stands below


def test_methods_differ_in_shape_and_not_in_colour_alone():
    looks = assign_styles(["local", "fedavg", *"abcde"])
    lines = {method: one_line((1, 1.0, None), (2, 2.0, None)) for method in looks}
    marks = drawn(draw_curves(lines, looks, "T", "round", "y"), "dot")
    assert len({mark.get("d") for mark in marks}) == len(looks)


def test_a_long_head_loses_letters_of_the_name_and_no_figure():
    method = "ditto:lam=0.1,personal_epochs=2,epochs=5+prox:mu=0.01"
    heads = {method: f"{method}: median 93.1, worst 0.0, best 100.0"}
    svg = draw_strips(
        {method: np.array([1.0])}, heads, {method: ["n"]}, assign_styles([method]), "T", "x", width=NARROW
    )
    head = next(text for text in texts(svg) if "median" in text)
    assert head.endswith("…: median 93.1, worst 0.0, best 100.0")
    assert len(head) * 7.2 <= NARROW


def test_of_very_many_clients_some_are_drawn_and_it_is_said():
    svg = bars(np.linspace(-40, 40, 1000))
    assert len(drawn(svg, "bar")) == MOST_MARKS
    assert f"{MOST_MARKS} of 1000 clients, sorted by gain" in texts(svg)
    values = {"a": np.linspace(0, 100, 1000)}
    svg = draw_strips(values, {"a": "a"}, {"a": ["note"] * 1000}, assign_styles(["a"]), "T", "x")
    assert len(drawn(svg, "client")) == MOST_MARKS


def test_every_client_has_a_dot_and_the_median_a_line():
    values = {"a": np.array([10.0, 20.0, np.nan, 60.0])}
    svg = draw_strips(values, {"a": "a: median 20.0"}, {"a": ["n"] * 4}, assign_styles(["a"]), "T", "x", width=NARROW)
    dots = {dot.get("data-client"): float(dot.get("cx")) for dot in drawn(svg, "client")}
    assert [*dots] == ["0", "1", "3"]
    assert drawn(svg, "median")[0].get("d").startswith(f"M{dots['1']:.1f} ")


def test_what_is_taken_most_is_darkest():
    matrix = np.array([[0.8, 0.2, 0.0], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
    svg = draw_heatmap(matrix, ["a", "b", "c"], ["x"] * 3, "T")
    shades = {one.get("fill-opacity"): one.get("d").count("M") for one in drawn(svg, "shade")}
    assert shades["1.00"] == 1
    assert sum(shades.values()) == 8  # nothing is drawn for nothing
    assert len(drawn(svg, "hit")) == 3
    many = draw_heatmap(np.eye(300), [str(k) for k in range(300)], ["x"] * 300, "T")
    assert len(drawn(many, "hit")) == MOST_MIXING
    assert drawn(draw_heatmap(np.zeros((2, 2)), ["a", "b"], ["x"] * 2, "T"), "shade") == []


def test_names_and_titles_are_escaped():
    nasty = '<b>&"'
    for svg in (
        bars([1, 2], names=["a<b", nasty]),
        draw_heatmap(np.eye(2), [nasty] * 2, [nasty] * 2, nasty),
        draw_curves({nasty: one_line((1, 1.0, None), (2, 2.0, None))}, assign_styles([nasty]), nasty, nasty, nasty),
        draw_strips({nasty: np.ones(2)}, {nasty: nasty}, {nasty: [nasty] * 2}, assign_styles([nasty]), nasty, nasty),
    ):
        assert "<b>" not in svg
        ET.fromstring(svg)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_methods_differ_in_more_than_colour():
    looks = assign_styles(["local", "fedavg", "a", "b", "c"])
    assert [look.place for look in looks.values()] == [0, 1, 2, 3, 4]
    assert len({look.kind for look in looks.values()}) == 5
    assert len({looks[name].dash for name in "abc"}) == 3


def test_a_reference_is_grey_whatever_its_hyperparameters():
    looks = assign_styles(["fedavg:epochs=5", "fedavg", "ditto"])
    assert looks["fedavg:epochs=5"].kind == "fedavg"
    assert looks["fedavg"].kind != "fedavg"


def test_every_kind_has_a_colour_in_light_and_dark():
    text = write_palette()
    for method in assign_styles([f"method {number}" for number in range(8)]).values():
        assert text.count(f"--{method.kind}:#") == 2
        assert f".{method.kind}{{--c:var(--{method.kind})}}" in text


def test_ticks_are_round_and_cover():
    assert find_ticks(43, 97) == [40, 50, 60, 70, 80, 90, 100]
    assert find_ticks(-0.4, 0.3) == pytest.approx([-0.4, -0.2, 0.0, 0.2, 0.4])
    assert len(find_ticks(5, 5)) == 2


def test_decades_are_filled_where_they_are_few():
    assert find_decades(0.9, 30) == pytest.approx([1, 2, 5, 10, 20])
    assert find_decades(1, 1e6) == pytest.approx([10.0**power for power in range(7)])
    assert find_decades(3, 3.1) == [3]


def test_a_selection_keeps_both_ends():
    order = np.arange(1000)[::-1]
    some = pick_evenly(order, 200)
    assert (len(some), some[0], some[-1]) == (200, 999, 0)
    assert len({*some.tolist()}) == 200
    assert pick_evenly(order[:5], 200).tolist() == order[:5].tolist()


def test_labels_keep_their_distance_and_order():
    moved = move_apart({"a": 10.0, "b": 11.0, "c": 50.0}, 15)
    assert moved["b"] - moved["a"] == pytest.approx(15)
    assert moved["a"] < moved["b"] < moved["c"]


def test_the_wide_figure_is_as_wide_as_the_picture_of_the_partition():
    assert WIDTH == 760


# -- clusters ----------------------------------------------------------------------------------------------------------

TREE = np.array([[1.0, 3.0, 0.5, 2.0], [0.0, 4.0, 2.0, 3.0]])  # 1 with 3, then 0 with both; 2 was not there


def grouped(numbers, merges=None, planted=None, order=None, names=None, width=WIDTH):
    numbers = np.array(numbers)
    names = [str(client) for client in range(len(numbers))] if names is None else names
    order = np.arange(len(numbers)) if order is None else np.array(order)
    found = Clusters(numbers, merges, "distance")
    return draw_clusters(found, None if planted is None else np.array(planted), order, names, names, "T", width=width)


def test_neighbours_of_one_cluster_share_a_box_that_names_it():
    svg = grouped([0, 1, 0, -1], planted=[5, 6, 6, 5], order=[0, 2, 1, 3])
    boxes = [float(box.get("width")) for box in drawn(svg, "cluster")]
    assert boxes == [78.0, 38.0, 38.0]  # columns of 40
    assert [box.get("class") for box in drawn(svg, "cluster")] == ["cluster m0", "cluster m1", "cluster none"]
    assert len(drawn(svg, "group")) == 3  # 5; 6 and 6; 5
    assert [text for text in texts(svg) if text] == ["0", "2", "1", "3", "cluster", "cluster 0", "1", "none", "planted",
                                                     "5", "group 6", "5"]  # fmt: skip
    assert [one.get("data-client") for one in drawn(svg, "hit")] == ["0", "2", "1", "3"]
    assert not drawn(svg, "branch")


def test_branches_have_the_colour_of_a_cluster_where_all_below_are_in_it():
    svg = grouped([0, 1, 1, 1], TREE, order=[0, 1, 3, 2])
    joint, inside = drawn(svg, "branch")
    assert (joint.get("class"), inside.get("class")) == ("branch none", "branch m1")
    assert joint.get("d").startswith("M78.0 210.0V30.0H138.0V")  # from client 0 to the middle of 1 and 3
    assert "distance" in texts(svg)
    assert grouped([0, 1, 1, 1], np.zeros((0, 4))).count("branch") == 0


def test_counts_have_whole_ticks():
    svg = grouped([0, 1, 2], np.array([[0, 1, 1.0, 2], [3, 2, 2.0, 3]]))
    assert {"0", "1", "2"} <= {*texts(svg)}
    assert "0.5" not in texts(svg)


def test_of_very_many_clients_some_are_drawn_with_the_tree_they_have():
    chain = np.array([[0.0, 1.0, 1.0, 2.0]] + [[499 + row, row + 1.0, row + 1.0, 2.0 + row] for row in range(1, 499)])
    svg = grouped([0] * 500, chain)
    assert len(drawn(svg, "hit")) == MOST_MARKS
    (branch,) = drawn(svg, "branch")
    assert branch.get("d").count("M") == MOST_MARKS - 1
    assert "499" not in texts(svg)  # no room for names


def test_names_of_clients_are_short_enough_or_left_out():
    assert "11" in texts(grouped([0] * 12, names=[f"client {number}" for number in range(12)], width=NARROW))
    assert not {"anna", "ben"} & {*texts(grouped([0, 0], names=["anna", "ben"]))}


# -- very many clients -------------------------------------------------------------------------------------------------


def test_bins_count_clients_and_the_harmed_among_them():
    values = {"a": np.array([-10.0, -10.0, 0.0, 0.0, 0.0, 10.0, np.nan]), "b": np.full(7, 10.0)}
    harmed = {"a": np.array([True, False, False, False, False, False, False])}
    svg = draw_bins(
        values, harmed, {"a": "a: some", "b": "b: all"}, assign_styles(["a", "b"]), "T", "gain", width=NARROW
    )
    bars = drawn(svg, "bar")
    notes = [bar.find("title").text.partition(": ")[2] for bar in bars]
    assert notes == [
        "2 clients, 1 of them harmed", "2 clients, 1 of them harmed", "3 clients", "1 clients", "7 clients"
    ]  # fmt: skip
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[2] / heights[0] == pytest.approx(3, rel=0.05)
    assert len(drawn(svg, "harmed")) == 1
    middles = [float(bar.get("x")) + float(bar.get("width")) / 2 for bar in bars]
    ticks = {float(text.text): float(text.get("x")) for text in drawn(svg, "tick")}
    assert middles[2] == pytest.approx(ticks[0], abs=0.2)  # those that gain nothing stand over 0
    assert {"a: some", "b: all", "gain"} <= {*texts(svg)}


def test_a_million_values_make_a_small_figure():
    values = {"a": np.random.default_rng(0).normal(size=1_000_000)}
    svg = draw_bins(values, {}, {"a": "a"}, assign_styles(["a"]), "T", "x")
    assert len(svg) < 12_000
    assert draw_bins({"a": np.array([np.nan])}, {}, {"a": "a"}, assign_styles(["a"]), "T", "x") == ""
