"""`python -m vlcam` is the command `vlcam`."""

from vlcam.cli import main

main()
