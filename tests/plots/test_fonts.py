"""Names with characters that the default font lacks."""

import warnings

import pytest
from matplotlib import rc_context
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

from subbayes.plots import fonts
from subbayes.plots.style import new_axes, png


@pytest.fixture(autouse=True)
def no_cache():
    fonts._font_of.cache_clear()
    yield
    fonts._font_of.cache_clear()


def test_characters_are_written_in_an_installed_font_that_has_them():
    with rc_context({"font.family": ["cmtt10"]}), warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = new_axes()
        ax.set_xlabel("Ж in years")
        ax.set_xticks([0, 1], ["Ж", "b"])
        assert fonts.missing_characters("aЖЖ") == "Ж"
        png(ax)
        for text in (ax.xaxis.label, ax.get_xticklabels()[0]):
            first, second = text.get_fontfamily()
            assert first == "cmtt10"
            font = get_font(findfont(FontProperties(family=[second])))
            assert ord("Ж") in font.get_charmap()


def test_one_warning_names_the_characters_that_no_font_has(monkeypatch):
    own = [font for font in fontManager.ttflist if "DejaVu" in font.name]
    monkeypatch.setattr(fontManager, "ttflist", own)
    ax = new_axes()
    ax.set_xlabel("年龄")
    ax.set_ylabel("年")
    with pytest.warns(UserWarning, match="boxes for the characters") as caught:
        png(ax)
    assert [str(w.message) for w in caught] == [
        "figures show boxes for the characters 年龄, which no installed font has; install one, "
        "such as Noto Sans CJK"
    ]
