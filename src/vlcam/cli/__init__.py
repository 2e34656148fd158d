"""The command line: one module per command, or per few that belong together; `base` has what they share."""

from vlcam.cli.ambiguity import ambiguity
from vlcam.cli.audit import audit
from vlcam.cli.base import app, main
from vlcam.cli.demo import demo
from vlcam.cli.explain import explain
from vlcam.cli.ground import ground
from vlcam.cli.known import anatomy, models, recipes
from vlcam.cli.report import report
from vlcam.cli.saved import compare, verify
from vlcam.cli.sweep import sweep

__all__ = ["app", "main"]

for command in (explain, ground, sweep, ambiguity, verify, compare, report, audit, models, recipes, anatomy, demo):
    app.command()(command)
