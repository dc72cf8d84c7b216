"""`python -m benchmarks NAME [--json] [--quick] [--threads 1] [--data-dir DIR]`.

The last line printed is one JSON object; see `benchmarks/harness.py`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks import harness


def names() -> list[str]:
    """The benchmarks there are, one file each."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    parts = ("laplace_serve", "regress_mgcv", "regress_other", "regress_peers", "streamed_serve")
    others = ("floor", "harness", "jax_networks", "record", *parts)
    return sorted(f.stem for f in files if f.stem not in others)


def main() -> int:
    """Run one benchmark; the exit status says whether every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--quick", action="store_true", help="the same at a smaller size")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--data-dir", default=None, help="folder of the real data sets")
    options = parser.parse_args()
    say = (lambda *_: None) if options.json else (lambda *line: print(*line, flush=True))
    harness.use_threads(options.threads)
    run = importlib.import_module(f"benchmarks.{options.name}").run
    results, bars = run(quick=options.quick, data_dir=options.data_dir, say=say)
    say(harness.bars_as_text(bars))
    print(
        json.dumps(
            {
                "name": options.name,
                "quick": options.quick,
                "versions": harness.versions(),
                "threads": options.threads,
                "machine": harness.machine(),
                "results": results,
                "bars": bars,
            }
        )
    )
    return 0 if all(bar["holds"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
