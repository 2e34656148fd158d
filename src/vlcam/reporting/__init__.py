"""What a paper should say of a map: checklist, methods paragraph, formula, sources, and a page that shows it."""

from vlcam.reporting.report import Report

__all__ = ["Report"]
