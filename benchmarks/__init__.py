"""What vlcam costs and how well its maps point, measured: `python -m benchmarks itm` and `... pointing`."""
