"""Training recipes: tasks with verifiable rewards, models, run records and the HTML report.

``tasks``, ``recorder`` and ``report`` import neither torch nor an engine; ``models`` does.
"""
