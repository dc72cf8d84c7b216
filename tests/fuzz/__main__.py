"""Run a campaign, print a table, and fail if there is a failure."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from fuzz.campaign import Campaign
from fuzz.models import MODELS


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=4000, help="number of cases, of all models")
    parser.add_argument("--all", action="store_true", help="all forgeries, however many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--folder", type=Path, help="where to keep the artifacts")
    parser.add_argument("--json", type=Path, help="file for the counts and the failures")
    options = parser.parse_args()
    begun = time.monotonic()
    each = -(-options.cases // len(options.models))
    with tempfile.TemporaryDirectory() as temporary:
        campaign = Campaign(options.folder or Path(temporary), options.models)
        try:
            forged = sys.maxsize if options.all else -(-each // 2)
            rng = random.Random(options.seed)
            campaign.run(campaign.cases(rng, forged, each // 2))
        finally:
            campaign.close()
    print(campaign.table())
    for name, label, outcome, text in campaign.failures:
        print(f"{outcome}: {name}: {label[:100]}: {text[:300]}")
    total, seconds = sum(campaign.counts.values()), time.monotonic() - begun
    print(f"{total} cases, {len(campaign.failures)} failures, {seconds:.0f} s")
    if options.json:
        counts = [[*key, n] for key, n in sorted(campaign.counts.items())]
        found = {"seed": options.seed, "cases": total, "seconds": seconds, "counts": counts,
                 "failures": campaign.failures, "accepted": campaign.accepted}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1))
    return bool(campaign.failures)


if __name__ == "__main__":
    sys.exit(main())
