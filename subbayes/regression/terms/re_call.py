"""Random intercepts written as a call: `re(school)`."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from subbayes.regression.formula.splitting import plain_name
from subbayes.regression.terms.calls import CallTerm
from subbayes.regression.terms.group_effects import GroupTerm
from subbayes.regression.terms.law import WrittenTerm
from subbayes.utils.checks import fail


class RandomIntercept(CallTerm):
    """`re(g)`, another spelling of `(1 | g)`."""

    @classmethod
    @override
    def parse(cls, argument: str, text: str) -> Sequence[WrittenTerm]:
        groups = text[text.index("(") + 1 : -1]
        name = plain_name(groups)
        if name is not None:
            return [GroupTerm("1", (name,), True)]
        remedy = "Write a term of each column, or (1 | a:b) for combinations of columns"
        fail(argument, "re(...) of one column", repr(text), remedy)
