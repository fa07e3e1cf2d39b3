"""Widgets: one .py and one .js each. `from kvlab.widgets.base import show`."""
