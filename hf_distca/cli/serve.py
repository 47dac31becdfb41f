"""hf-distca serve: run a dedicated attention server."""

import argparse
import logging
import signal
import sys
from typing import TYPE_CHECKING

from hf_distca.cli import InputError
from hf_distca.cli.names import check_kernel
from hf_distca.cli.options import port, seconds, threads
from hf_distca.kernel_names import KERNEL_NAMES
from hf_distca.pool.child import end_with_parent
from hf_distca.pool.nixl import installed_package
from hf_distca.pool.token import parse_address, parse_token, read_token
from hf_distca.progress import importing

if TYPE_CHECKING:
    import torch

    from hf_distca.pool.server import AttentionServer

DESCRIPTION = """\
Be a dedicated attention server (experimental): compute core attention for the ranks of a run until
training ends or Ctrl-C. A server holds no model.

Start it before or during training, on any host that the ranks can reach and that can reach the
ranks. It accepts only peers that know the run's token: 64 hexadecimal digits in a file that only
its owner can read. Nothing is encrypted: use it on a network that you trust.
"""


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text, least_port=1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "--join",
        required=True,
        type=_address,
        metavar="HOST:PORT",
        help="address at which the run accepts servers",
    )
    add(
        "--token-file",
        required=True,
        metavar="FILE",
        help="file with the run's token; - for standard input",
    )
    add(
        "--device",
        default="cpu",
        help="device to compute on: cpu, or a GPU such as cuda:0 (default: cpu)",
    )
    add(
        "--bind",
        default="127.0.0.1",
        metavar="HOST",
        help="interface to listen on for ranks (default: 127.0.0.1)",
    )
    add("--port", type=port, default=0, help="port to listen on (default: 0, any that is free)")
    kernel = (
        "kernel that computes core attention; a server whose kernel cannot compute what ranks ask "
        "for ends with an error (default: auto, the fastest that supports the model)"
    )
    add("--attention-kernel", default="auto", choices=KERNEL_NAMES, help=kernel)
    add(
        "--transport",
        default="auto",
        choices=("auto", "tcp", "nixl"),
        help=(
            "transport of rows; nixl without an RDMA device lets UCX listen on the interface of "
            "--bind, where it accepts any peer (default: auto, which is nixl where both ends have "
            "it and an RDMA device, else tcp)"
        ),
    )
    add(
        "--threads",
        type=threads,
        metavar="N",
        help="CPU threads to compute with (default: all cores)",
    )
    wait = "time to try to join, and to join again after the run could not be reached (default: 60)"
    add("--wait", type=seconds, default=60.0, metavar="SECONDS", help=wait)
    # Of a server of the launch: the process that it ends with.
    add("--parent", type=int, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Serve until training ends, or the process gets SIGINT or SIGTERM.

    InputError: it cannot serve.
    """
    if options.parent is not None:
        end_with_parent(options.parent)
    logging.basicConfig(
        format="%(levelname)s %(message)s", level=logging.WARNING, stream=sys.stderr
    )
    token = _read_token(options.token_file)
    check_kernel(options.attention_kernel)
    if options.transport == "nixl":
        try:
            installed_package()
        except ImportError as error:
            raise InputError(f"--transport nixl cannot be used: {error}") from error

    with importing("torch"):
        import torch

        from hf_distca.pool.wire import LinkLost, MismatchError

    device = _device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    server = _make_server(options, token, device)
    previous_handlers = {
        number: signal.signal(number, lambda *_: server.stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        host, port = options.join
        server.run(host, port, options.wait, lambda line: print(line, flush=True))
    except MismatchError as error:
        raise InputError(f"the training run cannot use this server: {error}") from error
    except LinkLost as error:
        raise InputError(f"{error}; see --join, --token-file and --wait") from error
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        server.close()


def _read_token(source: str) -> bytes:
    """Return the token in a file, or in a line of standard input where the source is "-"."""
    try:
        return parse_token(sys.stdin.readline()) if source == "-" else read_token(source)
    except ValueError as error:
        raise InputError(str(error)) from error


def _device(name: str) -> "torch.device":
    """Return the device of this host with a name; "cuda" is the first GPU."""
    import torch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    full_name = "cuda:0" if name == "cuda" else name
    if full_name not in devices:
        raise InputError(f"no device {name!r} on this host; set --device to {' or '.join(devices)}")
    return torch.device(full_name)


def _make_server(
    options: argparse.Namespace, token: bytes, device: "torch.device"
) -> "AttentionServer":
    """Make a server that listens; InputError where the options cannot be used."""
    from hf_distca.kernels import get_kernel
    from hf_distca.kernels.speed import measured_need
    from hf_distca.pool.server import AttentionServer
    from hf_distca.pool.transport import Choice

    # The needs of ranks are known when they call. "auto" may then choose another kernel; a named
    # kernel stays.
    is_auto = options.attention_kernel == "auto"
    choose = (lambda need: get_kernel("auto", device, [need])) if is_auto else None
    try:
        kernel = get_kernel(options.attention_kernel, device, [measured_need(device)])
        return AttentionServer(
            token,
            device,
            kernel,
            choose=choose,
            host=options.bind,
            port=options.port,
            transport=Choice(options.transport),
        )
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(
            f"cannot listen on {options.bind}:{options.port}: {error}; see --bind and --port"
        ) from error
