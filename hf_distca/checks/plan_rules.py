"""Table of documents, nodes and profiles that cannot be planned."""

from hf_distca.checks.refusal import Refusal

NODES = (
    "give the number of ranks of every node, in the order of the ranks, or 1 where all links are "
    "equally fast"
)


class Plans:
    """What is refused before a plan is made."""

    # Lengths of documents
    NOT_LENGTHS = Refusal(
        "document lengths are {given}",
        "lengths must be 64-bit integers in one dimension",
        "give the number of tokens of each document",
        condition="lengths of documents that are no integers",
    )
    TOO_MANY_TOKENS = Refusal(
        "the documents hold more than {most} tokens",
        "plans cannot count so many",
        "use fewer documents in a micro-batch",
    )
    EMPTY_DOCUMENT = Refusal(
        "document {document} has length {length}",
        "a document needs a token",
        "leave empty documents out",
        condition="a length of 0 in `plan_micro_batch`",
    )
    # Nodes
    OTHER_NODE_SIZE = Refusal(
        "ranks_per_node={given} is set",
        "it does not divide the {ranks} ranks that train together",
        NODES,
        condition="`ranks_per_node` that does not divide the ranks",
    )
    OTHER_NODE_SIZES = Refusal(
        "ranks_per_node={given} adds up to {total} ranks",
        "{ranks} ranks train together",
        NODES,
        condition="`ranks_per_node` whose numbers add up to other than the ranks",
    )
    OTHER_RANKS = Refusal(
        "PlanSettings.ranks is {planned}",
        "{ranks} ranks run",
        "set it to that number",
        condition="a `Dispatcher` with settings for another number of ranks",
    )
    # Costs
    NO_PROFILE = Refusal(
        "there is no device profile at {given!r} ({why})",
        "it is neither a profile of the package nor a file that hf-distca profile wrote",
        "give one of {shipped}, or such a file",
        condition="`device_profile` that names no profile",
    )
