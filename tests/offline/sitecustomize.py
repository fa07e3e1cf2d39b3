"""Python runs this at start where this folder is on PYTHONPATH: children are offline too."""

from kvlab_offline import block

block()
