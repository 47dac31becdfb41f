"""Dedicated attention servers: processes without a model that compute core attention for ranks.

Joining. Rank 0 has a directory (`directory`). A server starts by itself (`hf-distca serve`) or is
one of the last processes of the launch (`launch`). It sends the directory its address and its
speed. Before every optimizer step each rank connects to the new servers, and those that all ranks
have reached take part (`rank/pool`).

Messages are small JSON texts (`messages`) on a connection that begins with a proof of the run's
token (`wire`); a `transport` carries rows.

    when                   from -> to          message     contents
    once a micro-batch     rank 0 -> server    PlanTables  layout and tasks, from which the server
                                                           makes its routes
    each core attention,   rank -> server      Call        the rank's rows of Q, K, V
    forward and backward                                   (backward: and dO, O, LSE)
                           server -> rank      Reply       rows of O, LSE (backward: dQ, dK, dV),
                                                           time and pairs
    every two seconds      server -> rank 0    Alive
    at the end             rank 0 -> server    End

A rank sends its rows (`rank/link`) when its own exchange starts, computes its local tasks, and
collects the results when it has nothing else to do. A `server` puts the rows of all ranks together
and computes the call when they are complete. Between steps ranks learn how fast every worker was
(`rank/speeds`).

Losing a server. A link that breaks, or a server that is silent for too long, shows when a rank
collects results. Ranks then agree on the lost servers (`Pool.without_lost`), and compute that
call's tasks themselves; later micro-batches are planned without the server. A lost rank ends a call
at the servers and nothing else of theirs. Nothing here uses torch.distributed's groups for rows: a
dead member must not end the ranks.
"""
