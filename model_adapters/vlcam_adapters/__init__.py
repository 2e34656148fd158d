"""The adapters that vlcam brings along: one module per model family and library.

They import the engine, never the other way round; the engine finds them through the entry points `vlcam.adapters`.
"""
