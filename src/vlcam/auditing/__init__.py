"""The audit of a table of papers: what each states of how its maps were made, and what that leaves open."""

from vlcam.auditing.making import audit
from vlcam.auditing.result import Audit
from vlcam.auditing.template import empty_table

__all__ = ["Audit", "audit", "empty_table"]
