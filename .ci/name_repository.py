"""Name the repository and its tag in what PyPI shows: links of README, addresses of the project.

python .ci/name_repository.py https://github.com/OWNER/NAME TAG
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LABEL = r"(?:!?\[[^\]]*\]\([^)]*\)|\[[^\]]*\]|[^\[\]])*"
"""Text of a link, which may hold a picture or brackets."""
LINK = re.compile(rf"(!?)\[({LABEL})\]\((?!https?:|#)([^)]+)\)")
OF_REPOSITORY = "../../"
"""How a link to a page of the repository begins that is no file, as GitHub shows README."""
URLS = "[project.urls]\n"


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown with links to files of the repository, and pictures, at `tag`."""

    def absolute(link: re.Match[str]) -> str:
        picture, label, path = link[1], LINK.sub(absolute, link[2]), link[3]
        if path.startswith(OF_REPOSITORY):
            return f"{picture}[{label}]({repository}/{path.removeprefix(OF_REPOSITORY)})"
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, text)


def with_addresses(settings: str, repository: str, tag: str) -> str:
    """Return pyproject.toml with the addresses of the project."""
    addresses = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    return settings.replace(URLS, URLS + lines)


if __name__ == "__main__":
    for name, change in (("README.md", with_absolute_links), ("pyproject.toml", with_addresses)):
        path = ROOT / name
        path.write_text(change(path.read_text(), *sys.argv[1:]))
