"""The page of an audit: sentences, tables and pictures in one HTML file that needs nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from atoll.kernel.html import html_table

if TYPE_CHECKING:
    from atoll.experiments.audit.findings import Audit

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } th, td { padding: .2rem .8rem } tbody tr { border-top: 1px solid #8886 }
figure { display: inline-block; margin: .5rem 1rem .5rem 0 } img { image-rendering: pixelated; max-width: 100% }
"""


def render_page(audit: Audit) -> str:
    """Return the page."""
    about = audit.about
    title = f"Audit of {about['method']} on {about['task']}"
    parts = [Markup("<h1>{}</h1>").format(title)]
    parts.append(
        Markup("<p>{}</p>").format(
            f"{about['rounds']} rounds, seed {about['seed']}; {about['audited']} of {about['clients']} clients "
            "audited. A figure of an attack is what this attack found, not the most that any could."
        )
    )
    parts += [Markup("<p>{}</p>").format(sentence) for sentence in audit.sentences]
    if audit.membership:
        rows = [
            [f"{one.model}, {one.attack}", str(one.auc), str(one.tpr), f"{one.mean:.3f}",
             f"{one.most:.3f} ({one.client})", str(one.members)]
            for one in audit.membership
        ]  # fmt: skip
        heads = ["model, attack", "AUC", "TPR at 1 % FPR", "mean of clients", "most (client)", "members"]
        note = "Intervals are 95 %, by bootstrap over samples. Guessing has an AUC of 0.5 and a TPR of 0.01."
        parts.append(html_table(heads, rows, title="Membership", note=note))
    head = Markup("<head><meta charset='utf-8'><title>{}</title><style>{}</style></head>").format(title, Markup(STYLE))
    body = Markup("\n").join(parts)
    return str(Markup("<!doctype html><html lang='en'>{}<body>{}</body></html>\n").format(head, body))
