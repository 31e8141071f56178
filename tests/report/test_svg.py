"""Elements of SVG: what is put into them is text, unless it is an element itself."""

import xml.etree.ElementTree as ET

from atoll.report.svg import element, join

NASTY = """</text><script>"'&{{ 7 }}"""


def test_text_and_attributes_come_out_as_they_went_in():
    found = ET.fromstring(element("text", NASTY, aria_label=NASTY))
    assert found.text == found.get("aria-label") == NASTY
    assert not [*found]


def test_elements_are_nested_and_not_escaped_again():
    found = ET.fromstring(element("g", element("title", NASTY), element("path"), " & ", 3))
    assert [one.tag for one in found] == ["title", "path"]
    assert found[0].text == NASTY
    assert found[1].tail == " & 3"


def test_attributes_are_named_as_in_svg_and_numbers_are_short():
    found = element("rect", class_="bar", data_client=12, x=1 / 3, y=4, rx=None, viewBox="0 0 1 1")
    assert found == '<rect class="bar" data-client="12" x="0.3" y="4" viewBox="0 0 1 1"/>'


def test_text_between_elements_is_escaped():
    assert join(element("g"), "<b>") == "<g/>&lt;b&gt;"
