"""A research workbench for speculative decode on GPUs."""

__version__ = "0.1.0"
