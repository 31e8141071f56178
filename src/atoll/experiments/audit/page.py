"""The page of an audit: sentences, tables and pictures in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from atoll.kernel.html import html_table

if TYPE_CHECKING:
    from atoll.experiments.audit.contribution import Contribution
    from atoll.experiments.audit.findings import Audit
    from atoll.experiments.audit.inversion import Picture, Values

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
    if audit.contribution is not None:
        parts.append(_tabulate(audit.contribution))
    parts += _show_pictures(audit.pictures)
    head = Markup("<head><meta charset='utf-8'><title>{}</title><style>{}</style></head>").format(title, Markup(STYLE))
    body = Markup("\n").join(parts)
    return str(Markup("<!doctype html><html lang='en'>{}<body>{}</body></html>\n").format(head, body))


def _tabulate(found: Contribution) -> Markup:
    """Return a table of what clients gave and have, those who gave most first."""
    rows = [
        [
            found.names[client], f"{100 * found.shapley[client]:+.2f}", f"{100 * found.alone[client]:+.2f}",
            str(found.rounds[client]), "–" if (own := found.score[client]) is None else f"{own:.3f}",
        ]
        for client in sorted(range(len(found.names)), key=lambda one: -found.shapley[one])
    ]  # fmt: skip
    note = (
        "Points of the shared model's validation score, summed over rounds: what the client's replies add (Shapley), "
        "and what is lost without them. Beside it the test score of the model that the client deploys. Indicative: "
        "values read validation samples and can be gamed."
    )
    heads = ["client", "Shapley value", "leave-one-out", "rounds", "its own score"]
    return html_table(heads, rows, title="Who contributes", note=note)


def _show_pictures(pictures: Sequence[Picture]) -> list[Markup]:
    """Return true samples beside what was rebuilt, under a heading for each attack; only pictures can be shown."""
    shown = [one for one in pictures if one.true.ndim == 3 and one.true.shape[0] in (1, 3)]
    parts = []
    for attack, samples in dict.fromkeys((one.attack, one.samples) for one in shown):
        heading = f"Rebuilt by {attack}, from {samples} sample{'s' * (samples > 1)} (left the truth)"
        parts.append(Markup("<h2>{}</h2>").format(heading))
        for one in shown:
            if (one.attack, one.samples) == (attack, samples):
                quality = f"{one.psnr:.1f} dB, SSIM {one.ssim:.2f}"
                caption = f"client {one.client}: {quality}; the mean sample {one.baseline:.1f} dB"
                image = Markup('<img width="208" alt="{}" src="data:image/png;base64,{}">').format(
                    caption, base64.b64encode(draw_pair(one)).decode()
                )
                parts.append(Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(image, caption))
    return parts


def draw_pair(one: Picture) -> bytes:
    """Return a PNG of a sample and of what was rebuilt of it, side by side on one scale."""
    from PIL import Image

    low, high = float(one.true.min()), float(one.true.max())

    def pixels(values: Values) -> Values:
        scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1) * 255
        return scaled.transpose(1, 2, 0)

    gap = np.full((one.true.shape[1], 1, one.true.shape[0]), 128.0)
    both = np.concatenate([pixels(one.true), gap, pixels(one.found)], axis=1).round().astype(np.uint8)
    picture = Image.fromarray(both[:, :, 0] if both.shape[2] == 1 else both)
    scale = max(1, 208 // picture.width)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    out = io.BytesIO()
    picture.save(out, format="png")
    return out.getvalue()
