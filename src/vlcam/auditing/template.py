"""An empty table to start with."""

from __future__ import annotations

import csv
import io

from vlcam.auditing.schema import COLUMNS, TEMPLATE

__all__ = ["empty_table"]


def empty_table() -> str:
    """The header of the table with every column, and one row that shows how cells are filled, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerow(TEMPLATE)
    return text.getvalue()
