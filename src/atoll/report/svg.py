"""Elements of SVG as text that is safe to show: whatever is put into one is escaped."""

from __future__ import annotations

from markupsafe import Markup, escape


def element(tag: str, *inner: object, **attributes: object) -> Markup:
    """Write an element: `element("text", name, x=3.0, class_="tick")`.

    Text inside and values of attributes are escaped, unless they are elements already. Floats get one digit, and what
    is None is left out. `data_client` becomes `data-client`; `class_` has its underscore because of Python.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(f"{value:.1f}" if isinstance(value, float) else value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{join(*inner)}</{tag}>" if inner else f"<{tag}{written}/>")


def join(*elements: object) -> Markup:
    """Put elements one after another; what is not an element is escaped."""
    return Markup("").join(map(escape, elements))
