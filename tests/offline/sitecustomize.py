"""Python runs this at start where the folder is on PYTHONPATH: children of tests are offline too."""

from kvlab_offline import block

block()
