"""Links from pages to files of the repository, which the site does not contain.

Their text stays, as code.
"""

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files outside the documentation by their text.

    MkDocs calls this for each page.

    A link to a file that does not exist stays as it is, so that a strict build fails.
    """
    docs, folder = Path(config.docs_dir).resolve(), Path(page.file.abs_src_path).resolve().parent

    def text_alone(link: re.Match[str]) -> str:
        target = (folder / link[2].split("#")[0]).resolve()
        return link[1] if target.exists() and not target.is_relative_to(docs) else link[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(((?!\w+:)[^)\s#][^)\s]*)\)", text_alone, markdown)
