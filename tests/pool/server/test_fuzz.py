"""Ten thousand things that a server must not be impressed by, while it serves."""

import threading
import time

from hf_distca.pool.directory import Directory
from hf_distca.pool.messages.hello import RankHello
from hf_distca.pool.messages.kinds import SERVER_SERVICE
from hf_distca.pool.messages.plan import encode_plan
from hf_distca.pool.wire import make_token
from tests.pool.server.fake_ranks import SLIM, FakeRank, make_call, make_nano_batch, run_calls
from tests.pool.server.processes import ServerProcess
from tests.pool.wire.strangers import Strangers, message

INPUTS = 10_000
WARM_UP = 1_500


def strangers_at(port, token, nano_batches):
    """Those that know the token claim to be rank 7 of 8, which the plan does not know."""
    header, tables = encode_plan(0, 2, nano_batches)
    call = make_call(0, 5, 0, SLIM, "forward").header()
    hello = message(1, RankHello(7, 8).header())
    valid = [
        hello,
        message(4, header, b"".join(table.tobytes() for table in tables)),
        message(5, {}),
        message(6, call, bytes(1000)),
        message(6, call, payload_bytes=2**50),
        message(7, {}, bytes(8)),
        message(9, {}),
    ]
    return Strangers(port, token, SERVER_SERVICE, hello, valid, seed=0)


def test_ten_thousand_random_inputs(tmp_path):
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    server = ServerProcess(directory, token, tmp_path)
    try:
        port = server.joined().port
        nano_batches = [make_nano_batch([120, 37, 1, 90], 2, 1, 1, kinds=(SLIM,))]
        ranks = [FakeRank(port, token, rank, 2, 2) for rank in range(2)]
        ranks[0].send_plan(0, nano_batches)
        served, failures, over = [0], [], threading.Event()

        def train():
            try:
                while not over.is_set():
                    served[0] = run_calls(ranks, 0, nano_batches, served[0])
                    time.sleep(0.05)
            except BaseException as error:
                failures.append(error)

        training = threading.Thread(target=train)
        training.start()
        strangers = strangers_at(port, token, nano_batches)
        for _ in range(WARM_UP):
            strangers()
        before, served_before, inputs = server.memory(), served[0], 0
        while training.is_alive() and (inputs < INPUTS - WARM_UP or served[0] <= served_before + 20):
            strangers()
            inputs += 1
        grown, served_after = server.memory() - before, served[0]
        over.set()
        training.join()
        assert not failures
        run_calls(ranks, 0, nano_batches, served[0])
        strangers.close()
        for rank in ranks:
            rank.link.close()
        directory.end()
        assert server.process.wait(60) == 0
    finally:
        server.close()
        directory.close()
    said = server.text()
    print(f"{inputs} inputs, memory grew by {grown / 1e6:.1f} MB, {served_after} calls")
    assert "refused" in said
    assert "more refusals like these" in said
    assert "Traceback" not in said
    assert len(said) < 100_000
    assert grown < 20e6
