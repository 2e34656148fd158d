"""The published recipes, by what they read and how; `vlcam.catalogue` finds them by name."""
