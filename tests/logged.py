"""Messages of a logger, for tests."""

import logging


class Messages(logging.Handler):
    """Keeps the messages of a logger from INFO on, until `end`: in `lines`, of each its level and
    its text.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._logger = logging.getLogger(name)
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def end(self) -> None:
        self._logger.removeHandler(self)
