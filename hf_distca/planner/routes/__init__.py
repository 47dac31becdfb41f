"""Routes: rows that one rank gathers, sends, receives and scatters to carry out a plan.

Routes are made once per micro-batch and used by every layer. There are three kinds of row numbers:

- A row of a document: its position there, as in segments and tasks. It is used only inside this package.
- A local row: a row of the nano-batch on this rank (Segment.offset + position in the segment).
- A received row: its position among the rows received, in the order (owner, document, position). Q rows, and K/V rows
  of each stage, are counted apart. K/V rows that the worker holds itself can be among them; these cross no link. K/V
  rows forwarded by another rank of the node come last, in the order (that rank, document, position).
"""

from hf_distca.planner.routes.make import make_routes
from hf_distca.planner.routes.moves import nothing_moves
from hf_distca.planner.routes.tables import ExchangedRows, Routes, Stage, TaskGroup

__all__ = [
    "ExchangedRows",
    "Routes",
    "Stage",
    "TaskGroup",
    "make_routes",
    "nothing_moves",
]
