"""Model cards: a page that says what a fitted model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["model_card"]


def model_card(
    parts: Mapping[str, str], summary: Mapping[str, Any], scores: Mapping[str, float]
) -> str:
    """A model card in Markdown.

    Args:
        parts: a sentence for each part, as `describe` gives.
        summary: numbers of the fit by name.
        scores: on held-out data, by name.

    Example:
        >>> print(model_card({"method": "MAP"}, {"networks": 1}, {"accuracy": 0.5}))
        # Posterior distribution of a fitted model
        <BLANKLINE>
        Predictions average over draws of the weights; made with
        [subbayes](https://pypi.org/project/subbayes/).
        <BLANKLINE>
        - method: MAP
        <BLANKLINE>
        | fit | |
        |---|---|
        | networks | 1 |
        <BLANKLINE>
        | score on held-out data | |
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
        "Predictions average over draws of the weights; made with",
        "[subbayes](https://pypi.org/project/subbayes/).",
        "",
        *(f"- {name}: {sentence}" for name, sentence in parts.items() if sentence),
        *_table("fit", summary),
        *_table("score on held-out data", scores),
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
    rows = [f"| {name} | {_shown(value)} |" for name, value in values.items()]
    return ["", f"| {title} | |", "|---|---|", *rows] if rows else []


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
