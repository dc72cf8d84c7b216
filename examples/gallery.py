"""Draw the pictures of the gallery: run the code of docs/gallery.md in the folder of its images.

python -m examples.gallery
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Run the blocks of the page one after another."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    folder = DOCS / "images" / "gallery"
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})


if __name__ == "__main__":
    main()
