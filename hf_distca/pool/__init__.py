"""Dedicated attention servers: processes without a model that compute core attention for the ranks of a run.

Who joins where. Rank 0 has a directory (`directory`). A server starts by itself (`hf-distca serve`) or is one of the
last processes of the launch (`launch`), connects to the directory, says where it listens and how fast it is, and says
from then on that it is alive. Before every optimizer step ranks ask rank 0 who is listed, and each connects to those
that are new: one link a pair of rank and server (`rank/link`, `server/rank_link`). Whom all ranks have reached takes
part (`rank/members`). Every connection begins with a proof of the run's token (`wire/handshake`).

What travels when. Words are messages with a small JSON header (`messages`) on an authenticated connection (`wire`);
rows are carried by a `transport`.

    once a micro-batch     rank 0 -> server    PLAN     layout and tasks; the server makes its routes of them
    each core attention,   rank -> server      CALL     with the rank's rows of Q, K, V (backward: and dO, O, LSE)
    forward and backward   server -> rank      REPLY    with O, LSE (backward: dQ, dK, dV), time and pairs
    every two seconds      server -> rank 0    ALIVE
    at the end             rank 0 -> server    END

A rank sends its rows (`rank/call`) when its own exchange starts, computes its own tasks, and collects the results
when it has nothing else to do. A server (`server/server`) puts the rows of all ranks together (`server/calls`),
computes the call when they are complete (`server/compute`), and keeps nothing of it. Between steps ranks learn from
what they saw how fast everybody is (`rank/speeds`); the next plans are made for that (`rank/pool`,
`hf_distca.planner.with_servers`).

What happens when one is lost. A link that breaks, or a server that is silent for too long, shows when a rank collects
results. Ranks then agree (`Members.without_lost`): whom one has lost, all have lost. The rows are still with the
ranks, which compute that call's tasks themselves (`hf_distca.planner.lost` says which of them does); later
micro-batches are planned without the server. A lost rank
ends a call at the servers and nothing else of theirs. A server that comes back is a new member. Nothing here uses
torch.distributed's groups for rows: a dead member must not end the ranks.
"""
