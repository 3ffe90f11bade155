"""Text and statistics: where calibration and evaluation tokens come from.

Imports neither `runtime` nor `compress`.
"""
