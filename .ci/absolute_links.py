"""Make README's links absolute, in place, for PyPI's long description, which has no other files.

python .ci/absolute_links.py https://github.com/OWNER/NAME TAG
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)]+)\)")


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown with links to files of the repository, and pictures, at `tag`."""

    def absolute(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    README.write_text(with_absolute_links(README.read_text(), *sys.argv[1:]))
