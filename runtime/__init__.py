"""The synchronous half of mlx-troupe: models, rows, caches, scheduling and text.

Nothing below this package knows trio, a clock or HTTP. Cores decide and return what to do;
the actors in ``mlx_troupe.actors`` wait and perform.
"""
