"""Model cards show names from a file as text."""

import re

import pytest

from subbayes.diagnostics.model_card import model_card

EVIL = [
    "x\n\n# Injected",
    "x\r- item\x1b[31m",
    "<script>alert(1)</script>",
    "<!-- hidden",
    "[click](javascript:alert(1))",
    "![image](https://example.org/a.png)",
    "a | b | c",
    "`code` **bold** _emphasis_ ~~no~~",
    "https://example.org and www.example.org",
    "\\[click](x)",
    "&lt;b&gt;",
]


@pytest.mark.parametrize("text", EVIL)
def test_text_of_a_file_is_shown_as_text(text):
    plain = model_card({"method": "MAP"}, {"networks": 1}, {"accuracy": 0.5})
    for parts in (
        ({"method": text}, {"networks": 1}, {"accuracy": 0.5}),
        ({"method": "MAP"}, {"networks": text}, {"accuracy": 0.5}),
        ({"method": "MAP"}, {"networks": 1}, {text: 0.5}),
    ):
        card = model_card(*parts)
        assert len(card.splitlines()) == len(plain.splitlines())
        changed = [a for a, b in zip(card.split("\n"), plain.split("\n"), strict=True) if a != b]
        (line,) = changed
        assert not re.search(r"[<>\x00-\x1f]|&(?!amp;|lt;|gt;|#8203;)", line)
        bare = re.sub(r"\\.", "", line)  # without what is escaped
        assert not re.search(r"[\[\]`*~!]|\b_|_\b|(?<!;)://|javascript:|www\.", bare)
        assert bare.count("|") == (0 if line.startswith("- ") else 3)


def test_names_and_numbers_are_shown_as_they_are():
    card = model_card({"prior": "N(0, 1.5^2)"}, {"ess_bulk": 12.0}, {"log density": -1.23456})
    for words in ("- prior: N(0, 1.5^2)", "| ess_bulk | 12 |", "| log density | -1.235 |"):
        assert words in card
