"""A trained network: what to do with it at each budget.

`recommend` compares what can be done with a network that has been trained, on rows that were held
out, and ships it only if it surely gains over temperature scaling.
"""

from subbayes.recommendation.recommend import recommend
from subbayes.recommendation.recommended import Recommendation

__all__ = ["Recommendation", "recommend"]
