"""Accounting of samples: every one that was issued is trained on, dropped for a named cause, queued or in flight, and none is lost.

The last two are not kept here but counted where the samples are, so that `check` compares two independent counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Ledger:
  """The counts of a run so far.

  Attributes:
    issued: samples started; one that is started again after a failure counts again.
    trained: samples that an optimizer step used.
    dropped: samples that none will use, by cause.
  """

  def __init__(self, issued: int = 0, trained: int = 0, dropped: Mapping[str, int] | None = None):
    self.issued, self.trained, self.dropped = issued, trained, Counter(dropped or {})

  def check(self, *, queued: int, in_flight: int) -> None:
    """Raise RuntimeError unless issued = trained + dropped + queued + in flight."""
    found = self.trained + self.dropped.total() + queued + in_flight
    if found != self.issued:
      raise RuntimeError(f'{self.issued} samples were issued, but {found} are accounted for: {self.trained} trained, {queued} queued, '
                         f'{in_flight} in flight, dropped {dict(self.dropped)}. This is a fault of the program: please report it.')

  def to_json(self) -> dict[str, Any]:
    """Return the counts as JSON values, the arguments of a new ledger."""
    return {'issued': self.issued, 'trained': self.trained, 'dropped': dict(self.dropped)}
