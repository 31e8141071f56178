"""Tables for notebooks: what `_repr_html_` returns. Colours and fonts are the notebook's own."""

from collections.abc import Iterable, Sequence

from markupsafe import Markup


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    sentences: Sequence[str] = (),
    note: str = "",
) -> Markup:
    """Return a table with its title and sentences above, and below what its figures mean; every text is escaped.

    The first cell of a row is its head; other cells are figures, and stand to the right.
    """
    right = Markup(' style="text-align: right"')
    lines = [Markup("<p><strong>{}</strong></p>").format(title)] if title else []
    lines += [Markup("<p>{}</p>").format(sentence) for sentence in sentences]
    aligned = [Markup(' style="text-align: left"'), *[right] * (len(heads) - 1)]
    cells = [Markup('<th scope="col"{}>{}</th>').format(*both) for both in zip(aligned, heads, strict=True)]
    lines += [Markup("<table><thead><tr>{}</tr></thead><tbody>").format(Markup().join(cells))]
    for head, *others in rows:
        first = Markup('<th scope="row" style="text-align: left">{}</th>').format(head)
        figures = [Markup("<td{}>{}</td>").format(right, cell) for cell in others]
        lines.append(Markup("<tr>{}</tr>").format(Markup().join([first, *figures])))
    lines.append(Markup("</tbody></table>"))
    if note:
        lines.append(Markup('<p style="max-width: 60em; opacity: 0.75"><small>{}</small></p>').format(note))
    return Markup("\n").join(lines)
