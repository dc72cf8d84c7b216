"""Model cards: a page that says what a fitted model is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from subbayes.utils.text_table import printable


def model_card(
    parts: Mapping[str, str], summary: Mapping[str, Any], scores: Mapping[str, float]
) -> str:
    """A model card in Markdown.

    Args:
        parts: a sentence for each part, as `describe` gives.
        summary: numbers of the fit by name.
        scores: by name; the card says that they were given, not of which rows they are.

    Names and sentences may come from a file of somebody else: they are shown as text, on one line,
    without headings, links or HTML.

    Example:
        >>> print(model_card({"method": "MAP"}, {"networks": 1}, {"accuracy": 0.5}))
        # Posterior distribution of a fitted model
        <BLANKLINE>
        Predictions average over draws of the weights; made with subbayes.
        <BLANKLINE>
        - method: MAP
        <BLANKLINE>
        | fit | |
        |---|---|
        | networks | 1 |
        <BLANKLINE>
        | score | |
        |---|---|
        | accuracy | 0.5 |
        <BLANKLINE>
        ```python
        import subbayes
        <BLANKLINE>
        model = subbayes.load("this folder", module)  # the base model with its adapters
        model.predict(inputs)
        ```
        <BLANKLINE>
    """
    lines = [
        "# Posterior distribution of a fitted model",
        "",
        "Predictions average over draws of the weights; made with subbayes.",
        "",
        *(f"- {_text(name)}: {_text(sentence)}" for name, sentence in parts.items() if sentence),
        *_table("fit", summary),
        *_table("score", scores),
        "",
        "```python",
        "import subbayes",
        "",
        'model = subbayes.load("this folder", module)  # the base model with its adapters',
        "model.predict(inputs)",
        "```",
        "",
    ]
    return "\n".join(lines)


def _table(title: str, values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_text(name)} | {_text(_shown(value))} |" for name, value in values.items()]
    return ["", f"| {title} | |", "|---|---|", *rows] if rows else []


def _text(value: Any) -> str:
    """Text on one line whose characters have no meaning in Markdown or HTML."""
    line = printable(" ".join(str(value).split()))
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`\[\]|!*~])", r"\\\1", line)
    line = re.sub(r"\b_|_\b", r"\\_", line)  # not of words such as ess_bulk
    return re.sub(r"(?i)\b(https?|ftp|mailto|javascript|www)([:.])", r"\1&#8203;\2", line)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
