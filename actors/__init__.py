"""The company: one file per actor, the messages between them, supervision and wiring.

Everything here runs on trio's thread except the body of ``gpu.ThreadWorker``. No MLX, no HTTP.
"""
