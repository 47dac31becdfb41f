"""Table of traces that cannot be read or joined."""

from hf_distca.checks.refusal import Refusal


class Traces:
    """What is refused in the files of `hf-distca timeline`."""

    NOT_A_TRACE = Refusal(
        "{path} is given",
        "it is not a trace that training wrote with trace_steps: {why}",
        "give files trace_rank_N.json of a training, or its output folder",
        condition="a file that is no trace of a training",
    )
    SAME_RANK = Refusal(
        "{path} and {other} are both of rank {rank}",
        "a picture has one row for each rank",
        "give one file per rank",
        condition="two traces of one rank",
    )
    OTHER_TRAININGS = Refusal(
        "the traces come from trainings with {ranks} ranks",
        "they cannot be joined",
        "give the files of one training",
        condition="traces of trainings on different numbers of ranks",
    )
