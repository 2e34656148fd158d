"""The command line: one module per command, or per few that belong together; `base` has what they share."""

from vlcam.cli.base import app, main
from vlcam.cli.demo import demo
from vlcam.cli.explain import explain
from vlcam.cli.ground import ground
from vlcam.cli.known import anatomy, models, recipes
from vlcam.cli.saved import verify
from vlcam.cli.sweep import sweep

__all__ = ["app", "main"]

for command in (explain, ground, sweep, verify, models, recipes, anatomy, demo):
    app.command()(command)
